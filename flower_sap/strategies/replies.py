"""The metrics of replies, apart from the arrays that came with them."""

import copy

import numpy as np
from flwr.app import Message, MetricRecord, RecordDict

from flower_sap.records import records_of


def metrics_of(reply: Message) -> MetricRecord:
    """Return the first metric record; a reply that was checked has one."""
    return records_of(reply.content, MetricRecord)[0]


def common_metrics(replies: list[Message]) -> list[str]:
    """Return the metrics that all replies have, in one shape.

    Flower ends the run when they differ; an odd metric is no reason to lose training.
    """
    if not replies:
        return []
    shapes = [
        {name: np.shape(value) for name, value in metrics_of(reply).items()}
        for reply in replies
    ]
    first = shapes[0]
    return [
        name
        for name, shape in first.items()
        if all(other.get(name) == shape for other in shapes)
    ]


def chosen_metrics(reply: Message, names: list[str]) -> MetricRecord:
    """Return some of a reply's metrics."""
    return MetricRecord({name: metrics_of(reply)[name] for name in names})


def with_content(reply: Message, content: RecordDict) -> Message:
    """Return the reply with another content."""
    other = copy.copy(reply)
    other.content = content
    return other


def without_arrays(reply: Message, metrics: MetricRecord) -> Message:
    """Return the reply with its metrics alone, so that its arrays can be freed."""
    return with_content(reply, RecordDict({"metrics": metrics}))
