"""Which module may import which: imports point one way, and odd ones have one home."""

import ast
import importlib
import pkgutil
from pathlib import Path

import pytest

import flower_sap

ROOT = Path(flower_sap.__file__).parent
FOUNDATION = {
    "errors",
    "events",
    "clock",
    "records",
    "wire",
    "_flower",
    "progress",
    "checks",
    "isolation",
}
# Package or module to all that it may import of flower_sap.
ALLOWED = {
    **dict.fromkeys(FOUNDATION, FOUNDATION),
    "payload": FOUNDATION | {"payload"},
    "data": FOUNDATION | {"payload", "data"},
    "strategies": FOUNDATION | {"payload", "strategies"},
    "clients": FOUNDATION | {"payload", "data", "clients"},
    "emulation": FOUNDATION | {"payload", "emulation"},
}
PUBLIC_FLOWER = {
    "flwr.app",
    "flwr.clientapp",
    "flwr.clientapp.mod",
    "flwr.serverapp",
    "flwr.serverapp.strategy",
    "flwr.simulation",
}
FILES = sorted(ROOT.rglob("*.py"))


def module_of(path):
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path):
    """Return the modules that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            if node.module in ("flower_sap", "flwr"):
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
            else:
                found.add(str(node.module))
    return found


def part_of(path):
    """Return the package or module of flower_sap that a file belongs to."""
    return [*module_of(path).split("."), ""][1]


def own_part(module):
    return module.split(".")[1]


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_imports_point_one_way(path):
    part = part_of(path)
    ours = {own_part(m) for m in imports(path) if m.startswith("flower_sap.")}

    assert ours <= ALLOWED.get(part, ours)


def test_the_foundation_imports_no_package():
    for path in FILES:
        if module_of(path).split(".")[-1] in FOUNDATION and path.parent == ROOT:
            ours = {own_part(m) for m in imports(path) if m.startswith("flower_sap.")}
            assert ours <= FOUNDATION


def test_nothing_imports_the_report_or_the_command_but_themselves():
    for path in FILES:
        part = part_of(path)
        ours = {own_part(m) for m in imports(path) if m.startswith("flower_sap.")}
        if part not in ("report", "cli"):
            assert not ours & {"report", "cli"}


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_only_the_clock_knows_the_time(path):
    if module_of(path) == "flower_sap.clock" or path.parent.name == "report":
        return

    assert not imports(path) & {"time", "datetime"}


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_only_one_file_touches_what_flower_does_not_promise(path):
    if module_of(path) == "flower_sap._flower":
        return

    flowers = {m for m in imports(path) if m.split(".")[0] == "flwr"}
    assert flowers <= PUBLIC_FLOWER


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_the_library_never_imports_the_apps_or_the_tests(path):
    tops = {m.split(".")[0] for m in imports(path)}

    assert not tops & {"strategies", "clients", "examples", "tests", "benchmarks"}


PACKAGES = ["flower_sap"] + [
    f"flower_sap.{info.name}"
    for info in pkgutil.iter_modules([str(ROOT)])
    if info.ispkg
]


@pytest.mark.parametrize("name", PACKAGES)
def test_public_names_are_listed_sorted_and_there(name):
    package = importlib.import_module(name)
    names = getattr(package, "__all__", [])

    assert list(names) == sorted(set(names))
    assert all(hasattr(package, each) for each in names)


def test_the_public_roots_of_flower_are_those_that_it_names():
    flwr = importlib.import_module("flwr")

    assert {"app", "clientapp", "serverapp"} <= set(flwr.__all__)
    assert "strategy" in importlib.import_module("flwr.serverapp").__all__
    assert "mod" in importlib.import_module("flwr.clientapp").__all__
