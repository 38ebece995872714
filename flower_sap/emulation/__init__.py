"""Virtual time behind Flower's Grid: devices, links, fleets, in-process nodes."""

from flower_sap.emulation.emulated_grid import EmulatedGrid
from flower_sap.emulation.fleet import (
    DEVICES,
    Device,
    Fleet,
    Link,
    NodeProfile,
    mbit_per_s,
)
from flower_sap.emulation.local_grid import LocalGrid
from flower_sap.emulation.virtual_clock import VirtualClock

__all__ = [
    "DEVICES",
    "Device",
    "EmulatedGrid",
    "Fleet",
    "Link",
    "LocalGrid",
    "NodeProfile",
    "VirtualClock",
    "mbit_per_s",
]
