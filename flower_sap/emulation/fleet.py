"""Who takes part: devices with a speed, behind links with a rate.

A `Fleet` is made from a seed (`Fleet.mixed`, `Fleet.mild`, `Fleet.ratio`) or read from
a TOML file::

    [[node]]
    name = "raspberry-pi-4b"
    count = 3                     # default 1
    samples_per_second = 64.0     # training examples processed per second
    jitter = 0.05                 # default 0: log-standard deviation of the speed
    uplink = 250_000.0            # bytes per second, node to server
    downlink = 250_000.0          # bytes per second, server to node
    latency = 0.05                # default 0: seconds, one way
"""

import json
import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_PI_4B = 64.0  # samples/s that a relative speed of 1 stands for in the fleets here

# Training rate relative to a Raspberry Pi 4B, from published latencies of ncnn
# (BSD-3) for MobileNet v2 and ResNet-18; from a telematics unit to a vehicle computer.
DEVICES: tuple[tuple[str, float], ...] = (
    ("telematics-unit", 0.2),
    ("raspberry-pi-3b+", 0.5),
    ("phone-low", 1.7),
    ("phone-mid", 2.3),
    ("roadside-x86", 2.5),
    ("raspberry-pi-5", 3.3),
    ("jetson-nano", 3.7),
    ("rk3588", 5.5),
    ("jetson-tx2", 9.4),
    ("phone-high", 10.0),
    ("jetson-agx-xavier", 11.0),
    ("jetson-orin-nano", 21.0),
    ("jetson-agx-orin", 25.0),
)


def mbit_per_s(rate: float) -> float:
    """Return a rate given in Mbit/s in bytes per second."""
    return rate * 1e6 / 8


@dataclass(frozen=True, slots=True)
class Device:
    """How fast a node computes.

    Parameters
    ----------
    name : str
        For tables and logs.
    samples_per_second : float
        Training examples processed per second, > 0.
    jitter : float
        Standard deviation of the log of the speed from message to message, >= 0.
    """

    name: str
    samples_per_second: float
    jitter: float = 0.0

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        _check_positive("samples_per_second", self.samples_per_second, "samples/s")
        if not 0 <= self.jitter < math.inf:
            raise ValueError(f"jitter must be >= 0, got {self.jitter}")


@dataclass(frozen=True, slots=True)
class Link:
    """How fast a node is reached; constant.

    Parameters
    ----------
    uplink, downlink : float
        Rates from and to the node (B/s), > 0; inf is no transfer time.
    latency : float
        One way, before the first byte (s), >= 0.
    """

    uplink: float
    downlink: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        for name, rate in (("uplink", self.uplink), ("downlink", self.downlink)):
            if not rate > 0:
                raise ValueError(f"{name} must be > 0 B/s, got {rate}")
        if not 0 <= self.latency < math.inf:
            raise ValueError(f"latency must be >= 0 s, got {self.latency}")

    def down_seconds(self, nbytes: int) -> float:
        """Return the time from the server's push to the node's last byte (s)."""
        return self.latency + nbytes / self.downlink

    def up_seconds(self, nbytes: int) -> float:
        """Return the time from the node's first byte to the server's last (s)."""
        return self.latency + nbytes / self.uplink


@dataclass(frozen=True, slots=True)
class NodeProfile:
    """One node: a device behind a link."""

    device: Device
    link: Link


@dataclass(frozen=True, slots=True)
class Fleet:
    """The nodes in partition order.

    Parameters
    ----------
    nodes : tuple of NodeProfile
        At least one.
    name : str
        For tables and logs.
    """

    nodes: tuple[NodeProfile, ...]
    name: str = "fleet"

    def __post_init__(self) -> None:
        """Refuse an empty fleet."""
        if not self.nodes:
            raise ValueError("a fleet needs >= 1 node, got 0")

    def __len__(self) -> int:
        """Return the number of nodes."""
        return len(self.nodes)

    @property
    def speeds(self) -> NDArray[np.float64]:
        """Return the nodes' speeds (samples/s), shape (n,)."""
        return np.array([node.device.samples_per_second for node in self.nodes])

    def tiers(self, num_tiers: int = 3) -> list[list[int]]:
        """Return node indices in speed groups of like size, slowest first."""
        order = np.argsort(self.speeds, kind="stable")
        return [part.tolist() for part in np.array_split(order, num_tiers)]

    def with_uplinks(self, slowest: float, fastest: float) -> "Fleet":
        """Return the same nodes with uplinks spread from `slowest` to `fastest` (B/s).

        The order of the links is kept, and so are their distances on a log scale.
        """
        if not 0 < slowest <= fastest < math.inf:
            raise ValueError(
                f"needs 0 < slowest <= fastest, got {slowest} and {fastest} B/s"
            )
        logs = np.log([node.link.uplink for node in self.nodes])
        span = logs.max() - logs.min()
        ranks = (logs - logs.min()) / span if span > 0 else np.zeros_like(logs)
        rates = (slowest * (fastest / slowest) ** ranks).tolist()
        return replace(
            self,
            nodes=tuple(
                replace(node, link=replace(node.link, uplink=rate))
                for node, rate in zip(self.nodes, rates, strict=True)
            ),
        )

    @classmethod
    def mixed(
        cls, num_nodes: int = 20, *, seed: int = 0, jitter: float = 0.0
    ) -> "Fleet":
        """Return devices from `DEVICES` behind links of 0.5 to 20 Mbit/s.

        Each device comes up as often as the others, the remainder at random. Links
        are log-uniform, alike in both directions and independent of the device.
        """
        rng = np.random.default_rng([seed, 1])
        rest = rng.permutation(len(DEVICES))[: num_nodes % len(DEVICES)]
        chosen = [*range(len(DEVICES))] * (num_nodes // len(DEVICES)) + rest.tolist()
        order = rng.permutation(len(chosen))
        devices = [DEVICES[chosen[index]] for index in order]
        rates = _log_uniform(rng, 0.5, 20.0, num_nodes)
        return cls(
            tuple(
                _profile(name, relative * _PI_4B, rate, jitter)
                for (name, relative), rate in zip(devices, rates, strict=True)
            ),
            name="mixed",
        )

    @classmethod
    def mild(
        cls, num_nodes: int = 20, *, seed: int = 0, jitter: float = 0.0
    ) -> "Fleet":
        """Return speeds of 1 : 10 and links of 1 : 10 (2 to 20 Mbit/s)."""
        return cls.ratio(num_nodes, 10.0, seed=seed, jitter=jitter, name="mild")

    @classmethod
    def ratio(
        cls,
        num_nodes: int,
        ratio: float,
        *,
        seed: int = 0,
        jitter: float = 0.0,
        name: str | None = None,
    ) -> "Fleet":
        """Return log-uniform speeds of 1 : `ratio`, the slowest 16 samples/s.

        Speeds are stratified (one per equal slice of the log range), so that the
        ratio is met by every seed; links are log-uniform from 2 to 20 Mbit/s.
        """
        if not ratio >= 1:
            raise ValueError(f"ratio must be >= 1, got {ratio}")
        rng = np.random.default_rng([seed, 2])
        ranks = rng.permutation(num_nodes) / max(1, num_nodes - 1)
        speeds = 16.0 * ratio**ranks
        rates = _log_uniform(rng, 2.0, 20.0, num_nodes)
        return cls(
            tuple(
                _profile(f"{speed:.0f} samples/s", float(speed), rate, jitter)
                for speed, rate in zip(speeds, rates, strict=True)
            ),
            name=name or f"1:{ratio:g}",
        )

    @classmethod
    def from_toml(cls, path: Path) -> "Fleet":
        """Read a fleet file.

        Raises
        ------
        ValueError
            If the file is not TOML, or an entry has an unknown key or a bad value;
            the message says which.
        """
        try:
            tables = tomllib.loads(path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not a TOML file: {error}") from error
        unknown = sorted(set(tables) - {"node", "name"})
        if unknown or not isinstance(tables.get("node"), list):
            raise ValueError(
                f"{path}: expected [[node]] entries"
                + (f", found also {unknown}" if unknown else "")
            )
        nodes: list[NodeProfile] = []
        for number, entry in enumerate(tables["node"], 1):
            try:
                nodes += _read_node(entry)
            except (ValueError, OverflowError) as error:
                raise ValueError(f"{path}, node {number}: {error}") from error
        try:
            return cls(tuple(nodes), name=_text(tables, "name", path.stem))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def to_toml(self) -> str:
        """Return a fleet file that `from_toml` reads back."""
        lines = [f"name = {_quoted(self.name)}"]
        for node in self.nodes:
            device, link = node.device, node.link
            lines += [
                "",
                "[[node]]",
                f"name = {_quoted(device.name)}",
                f"samples_per_second = {float(device.samples_per_second)!r}",
                f"jitter = {float(device.jitter)!r}",
                f"uplink = {float(link.uplink)!r}",
                f"downlink = {float(link.downlink)!r}",
                f"latency = {float(link.latency)!r}",
            ]
        return "\n".join(lines) + "\n"


_REQUIRED = {"samples_per_second", "uplink", "downlink"}
_OPTIONAL = {"name", "count", "jitter", "latency"}


def _read_node(entry: object) -> list[NodeProfile]:
    if not isinstance(entry, dict):
        raise ValueError(f"expected a table of keys and values, got {entry!r}")
    missing = sorted(_REQUIRED - set(entry))
    unknown = sorted(set(entry) - _REQUIRED - _OPTIONAL)
    if missing or unknown:
        raise ValueError(f"missing keys {missing}, unknown keys {unknown}")
    count = entry.get("count", 1)
    if type(count) is not int or not count >= 1:
        raise ValueError(f"count must be a whole number >= 1, got {count!r}")
    device = Device(
        _text(entry, "name", "device"),
        _real(entry, "samples_per_second"),
        _real(entry, "jitter"),
    )
    link = Link(
        _real(entry, "uplink"), _real(entry, "downlink"), _real(entry, "latency")
    )
    return [NodeProfile(device, link)] * count


def _real(entry: dict[str, Any], key: str) -> float:
    value = entry.get(key, 0.0)
    if type(value) not in (int, float):
        raise ValueError(f"{key} must be a number, got {value!r}")
    return float(value)


def _text(entry: dict[str, Any], key: str, default: str) -> str:
    value = entry.get(key, default)
    if not isinstance(value, str):
        raise ValueError(f"{key} must be a text in quotes, got {value!r}")
    return value


def _quoted(text: str) -> str:
    """Return a TOML string, whose escapes are those of JSON and one more."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _profile(name: str, speed: float, rate: float, jitter: float) -> NodeProfile:
    link = Link(mbit_per_s(rate), mbit_per_s(rate), latency=0.05)
    return NodeProfile(Device(name, speed, jitter), link)


def _log_uniform(
    rng: np.random.Generator, low: float, high: float, size: int
) -> Sequence[float]:
    values: list[float] = np.exp(rng.uniform(np.log(low), np.log(high), size)).tolist()
    return values


def _check_positive(name: str, value: float, unit: str) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be > 0 {unit}, got {value}")
