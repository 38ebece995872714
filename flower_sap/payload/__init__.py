"""Bytes on the wire: codecs, byte budgets, error feedback, hostile payloads refused."""

from flower_sap.payload.budget import (
    BandwidthAdaptive,
    BudgetRule,
    Fixed,
    Fraction,
    LinkView,
    budget_rule,
)
from flower_sap.payload.decoder import CodedUpdate, check
from flower_sap.payload.dense import ArraySpec, Manifest
from flower_sap.payload.encoder import Encoded, encode
from flower_sap.payload.estimation import Estimate, estimate
from flower_sap.payload.layout import Kind, Layout, Treatment
from flower_sap.payload.wire_format import Header

__all__ = [
    "ArraySpec",
    "BandwidthAdaptive",
    "BudgetRule",
    "CodedUpdate",
    "Encoded",
    "Estimate",
    "Fixed",
    "Fraction",
    "Header",
    "Kind",
    "Layout",
    "LinkView",
    "Manifest",
    "Treatment",
    "budget_rule",
    "check",
    "encode",
    "estimate",
]
