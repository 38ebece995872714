"""The apps at the top of the repository, without Flower's runtimes around them."""

import importlib
import tomllib
from pathlib import Path

import pytest
from flwr.app import Context, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from flower_sap import EmulatedGrid, Fleet, LocalGrid

ROOT = Path(__file__).parents[1]
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]


def run_config(**changes):
    return {**CONFIG["config"], **changes}


def test_the_flower_app_names_apps_that_exist():
    for kind, wanted in (("serverapp", ServerApp), ("clientapp", ClientApp)):
        module, _, name = CONFIG["components"][kind].partition(":")

        assert isinstance(getattr(importlib.import_module(module), name), wanted)


@pytest.mark.parametrize("name", ["heter_train", "fedbuff", "fedasync", "fedavg"])
def test_every_server_app_trains_the_vehicles(name):
    config = run_config(**{"num-server-rounds": 1})
    vehicle = importlib.import_module("clients.vehicle").app
    grid = EmulatedGrid(
        LocalGrid(vehicle, 4, run_config=config, seed=0), Fleet.mild(4, seed=0)
    )
    context = Context(0, 1, {}, RecordDict(), config)

    importlib.import_module(f"strategies.{name}").app(grid, context)

    assert grid.clock.now() > 0
    assert grid.bytes_up > 0


def test_the_run_config_can_size_uploads(tmp_path, monkeypatch):
    monkeypatch.setenv("FLOWER_SAP_HOME", str(tmp_path))
    sizes = {}
    for payload in ("", "1/3"):
        config = run_config(**{"num-server-rounds": 1, "payload": payload})
        vehicle = importlib.import_module("clients.vehicle").app
        grid = EmulatedGrid(
            LocalGrid(vehicle, 4, run_config=config, seed=0), Fleet.mild(4, seed=0)
        )
        context = Context(0, 1, {}, RecordDict(), config)
        importlib.import_module("strategies.heter_train").app(grid, context)
        sizes[payload] = grid.bytes_up

    assert sizes["1/3"] < 0.5 * sizes[""]
    assert list(tmp_path.rglob("*.safetensors"))
