"""The wrapped Flower strategy, asked for what it is good at and nothing else.

It decorates the train message, aggregates and evaluates. Sampling and time are the
engine's, so the grid that it sees is a stand-in that only counts nodes. What it gets
is checked, and what it gives is checked and put back into the model's own dtypes.
"""

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import (
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedProx,
    FedXgbCyclic,
    FedYogi,
    Strategy,
)

from flower_sap._flower import quiet_sampling
from flower_sap.errors import InnerStrategyError, PayloadError
from flower_sap.payload.dense import Arrays, Manifest, decode, encode
from flower_sap.records import copy_records, records_of
from flower_sap.strategies.aggregation import (
    Aggregator,
    KeepAll,
    Kind,
    StreamingMean,
    kind_of,
    largest_counters,
)

# A subclass that aggregates in its own way has another function here, and gets every
# update by itself.
_MEANS = (FedAvg.aggregate_train, FedProx.aggregate_train)
_OPTIMIZERS = tuple(
    strategy.aggregate_train for strategy in (FedAvgM, FedAdam, FedAdagrad, FedYogi)
)


class StandInGrid(Grid):
    """A grid that knows node ids and sends nothing."""

    def __init__(self, node_ids: Sequence[int], run: Any = None) -> None:
        self._node_ids = list(node_ids)
        self._run = run

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids."""
        return list(self._node_ids)

    @property
    def run(self) -> Any:
        """Return the real grid's run."""
        return self._run

    def set_run(self, run: Any) -> None:
        """Refuse: only the real grid has a run."""
        raise self._refusal("set_run")

    def create_message(self, *_: Any, **__: Any) -> Message:
        """Refuse: deprecated by Flower."""
        raise self._refusal("create_message")

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Refuse: the engine sends."""
        raise self._refusal("push_messages")

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Refuse: the engine receives."""
        raise self._refusal("pull_messages")

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Refuse: the engine does both, and never blocks."""
        raise self._refusal("send_and_receive")

    def _refusal(self, name: str) -> InnerStrategyError:
        return InnerStrategyError(
            f"the inner strategy called grid.{name} while configuring a round; "
            "SemiAsync sends and receives itself, so such a strategy cannot be wrapped"
        )


class InnerStrategy:
    """One Flower strategy and the model that it works on.

    Parameters
    ----------
    strategy : Strategy
        The wrapped strategy.
    manifest : Manifest
        What the model is.
    seed : int
        Of the draws that the strategy makes: who evaluates, where not all do.
    """

    def __init__(
        self, strategy: Strategy, manifest: Manifest, *, seed: int = 0
    ) -> None:
        self._strategy = strategy
        self._seed = seed
        self._manifest = manifest
        aggregate = type(strategy).aggregate_train
        self._is_mean = aggregate in _MEANS
        self._is_optimizer = aggregate in _OPTIMIZERS
        self._visible = [self._is_visible(kind_of(spec)) for spec in manifest.arrays]
        self._shown = Manifest(
            tuple(
                spec
                for spec, is_visible in zip(manifest.arrays, self._visible, strict=True)
                if is_visible
            )
        )
        self.weighted_by: str = _setting(strategy, "weighted_by_key", "num-examples")
        self._arrays_key: str = _setting(strategy, "arrayrecord_key", "arrays")
        self._config_key: str = _setting(strategy, "configrecord_key", "config")
        self.min_nodes = max(1, _setting(strategy, "min_available_nodes", 1))

    def _is_visible(self, kind: Kind) -> bool:
        # An optimizer step can push a variance below zero (NaN from then on).
        return kind is Kind.PARAMETER or (
            kind is Kind.STATISTIC and not self._is_optimizer
        )

    def aggregator(self, current: Arrays, *, exact: bool) -> Aggregator:
        """Return an empty aggregator around the current model.

        Parameters
        ----------
        current : Arrays
            The current model.
        exact : bool
            Hand every update to the inner strategy even if it only averages, so that
            the result is its own to the last bit.
        """
        if exact or not (self._is_mean or self._is_optimizer):
            return KeepAll(current, self._manifest)
        return StreamingMean(current, self._manifest)

    def train_content(
        self, step: int, arrays: ArrayRecord, config: ConfigRecord, node_ids: list[int]
    ) -> tuple[str, RecordDict]:
        """Return type and content of a train message for the current model.

        Raises
        ------
        InnerStrategyError
            If the inner strategy sends nobody anything.
        """
        shown = ArrayRecord({name: arrays[name] for name in self._shown.names})
        needed = max(1, *(_setting(self._strategy, name, 1) for name in _MINIMA))
        grid = StandInGrid(_padded(node_ids[:needed], needed))
        with quiet_sampling(f"{self._seed} train {step}"):
            messages = list(
                self._strategy.configure_train(
                    step, shown, ConfigRecord(dict(config)), grid
                )
            )
        if not messages:
            raise InnerStrategyError(
                f"{type(self._strategy).__name__}.configure_train returned no message "
                "(is fraction_train 0?), so there is nothing to train"
            )
        content = RecordDict(dict(messages[0].content))
        content[self._arrays_key] = arrays
        return messages[0].metadata.message_type, content

    def fresh_content(self, content: RecordDict, extra: dict[str, int]) -> RecordDict:
        """Return a copy for one message, with `extra` in its config.

        Flower's in-memory grid passes records by reference, so two messages must not
        share one.
        """
        records = copy_records(content)
        config = records.get(self._config_key)
        if not isinstance(config, ConfigRecord):
            records[self._config_key] = config = ConfigRecord()
        for name, value in extra.items():
            config[name] = value
        return records

    def aggregate(
        self,
        step: int,
        aggregator: Aggregator,
        scale: float,
        current: Arrays,
        replies: list[Message],
    ) -> tuple[Arrays, MetricRecord | None]:
        """Return the next model and the train metrics.

        Parameters
        ----------
        step : int
            Number of this aggregation, from 1: FedAdam's bias correction uses it.
        aggregator : Aggregator
            Holds the updates.
        scale : float
            Factor of their deltas.
        current : Arrays
            The current model.
        replies : list of Message
            Every reply merged, with its metrics but without its arrays.

        Raises
        ------
        InnerStrategyError
            If the inner strategy gives no model, or another one than it got.
        """
        models = aggregator.models(scale)
        is_streamed = isinstance(aggregator, StreamingMean)
        if is_streamed and self._is_mean:  # the mean is all there is to do
            return models[0][0], self._train_metrics(replies)
        rebuilt = self._rebuilt(models, replies, is_streamed=is_streamed)
        with quiet_sampling(f"{self._seed} merge {step}"):
            arrays, metrics = self._strategy.aggregate_train(step, rebuilt)
        if arrays is None:
            raise InnerStrategyError(
                f"{type(self._strategy).__name__}.aggregate_train returned no model "
                f"for {len(replies)} updates; it may need more of them per merge"
            )
        if is_streamed:
            metrics = self._train_metrics(replies)
        return self._completed(arrays, models, current, is_streamed), metrics

    def _rebuilt(
        self,
        models: list[tuple[Arrays, float]],
        replies: list[Message],
        *,
        is_streamed: bool,
    ) -> list[Message]:
        common = _common_metrics(replies)
        rebuilt = []
        for (arrays, num_examples), reply in zip(models, replies, strict=False):
            shown = [a for a, v in zip(arrays, self._visible, strict=True) if v]
            metrics = MetricRecord(
                {self.weighted_by: num_examples}
                if is_streamed
                else {name: _metrics(reply)[name] for name in common}
            )
            message = copy.copy(reply)
            message.content = RecordDict(
                {self._arrays_key: encode(shown, self._shown), "metrics": metrics}
            )
            rebuilt.append(message)
        return rebuilt

    def _completed(
        self,
        given: ArrayRecord,
        models: list[tuple[Arrays, float]],
        current: Arrays,
        is_streamed: bool,
    ) -> Arrays:
        """Return the inner strategy's model with the arrays that it did not see."""
        name = type(self._strategy).__name__
        if list(given) != self._shown.names:
            raise InnerStrategyError(
                f"{name} returned arrays {list(given)[:5]}, "
                f"expected {self._shown.names[:5]}"
            )
        cast = ArrayRecord()
        for spec in self._shown.arrays:
            values = given[spec.name].numpy()
            if values.shape != spec.shape:
                raise InnerStrategyError(
                    f"{name} returned {spec.name!r} as {list(values.shape)}, "
                    f"expected {list(spec.shape)}"
                )
            cast.update(encode([values.astype(spec.dtype)], Manifest((spec,))))
        try:
            shown = iter(decode(cast, self._shown))
        except PayloadError as error:
            raise InnerStrategyError(f"{name} returned a bad model: {error}") from error
        hidden = (
            models[0][0]
            if is_streamed
            else largest_counters([m for m, _ in models], current, self._manifest)
        )
        return [
            next(shown) if is_visible else hidden[index]
            for index, is_visible in enumerate(self._visible)
        ]

    def _train_metrics(self, replies: list[Message]) -> MetricRecord | None:
        average = getattr(self._strategy, "train_metrics_aggr_fn", None)
        if average is None:
            return None
        common = _common_metrics(replies)
        records = [
            RecordDict(
                {"metrics": MetricRecord({n: _metrics(reply)[n] for n in common})}
            )
            for reply in replies
        ]
        metrics: MetricRecord | None = average(records, self.weighted_by)
        return metrics

    def evaluate_messages(
        self,
        round_: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        node_ids: list[int],
    ) -> list[tuple[int, str, RecordDict]]:
        """Return (node id, type, content) of the messages that evaluate a round."""
        needed = max(1, *(_setting(self._strategy, name, 1) for name in _EVAL_MINIMA))
        grid = StandInGrid(_padded(node_ids, needed))
        with quiet_sampling(f"{self._seed} evaluate {round_}"):
            messages = list(
                self._strategy.configure_evaluate(
                    round_, arrays, ConfigRecord(dict(config)), grid
                )
            )
        known = set(node_ids)
        return [
            (
                message.metadata.dst_node_id,
                message.metadata.message_type,
                message.content,
            )
            for message in messages
            if message.metadata.dst_node_id in known
        ]

    def aggregate_evaluate(
        self, round_: int, replies: list[Message]
    ) -> MetricRecord | None:
        """Return the federated evaluation's metrics, over names common to all."""
        common = _common_metrics(replies)
        rebuilt = []
        for reply in replies:
            message = copy.copy(reply)
            message.content = RecordDict(
                {"metrics": MetricRecord({n: _metrics(reply)[n] for n in common})}
            )
            rebuilt.append(message)
        with quiet_sampling(f"{self._seed} metrics {round_}"):
            return self._strategy.aggregate_evaluate(round_, rebuilt)


_MINIMA = ("min_available_nodes", "min_train_nodes", "num_sampled_clients")
_EVAL_MINIMA = ("min_available_nodes", "min_evaluate_nodes")


def check_wrappable(strategy: Strategy) -> None:
    """Refuse a strategy that cannot work on updates of different versions.

    Raises
    ------
    TypeError
        If it is not a Flower message-API strategy.
    ValueError
        If its rule has no meaning here, with what to use instead.
    """
    if not isinstance(strategy, Strategy):
        raise TypeError(
            "inner must be a flwr.serverapp.strategy.Strategy (message API), got "
            f"{type(strategy).__module__}.{type(strategy).__name__}"
        )
    if isinstance(strategy, FedXgbCyclic):
        raise ValueError(
            "FedXgbCyclic passes one model from client to client, so there is nothing "
            "to merge asynchronously; use it unwrapped"
        )
    inner = getattr(strategy, "strategy", None)
    if isinstance(inner, Strategy):
        check_wrappable(inner)


def _setting(strategy: Strategy, name: str, default: Any) -> Any:
    """Return a setting of the strategy or of the one that it wraps itself."""
    value = getattr(strategy, name, None)
    if value is not None:
        return value
    wrapped = getattr(strategy, "strategy", None)
    return _setting(wrapped, name, default) if wrapped is not None else default


def _padded(node_ids: Sequence[int], needed: int) -> list[int]:
    # `sample_nodes` of Flower 1.42 sleeps for ever when there are fewer.
    missing = max(0, needed - len(node_ids))
    return [*node_ids, *(-1 - number for number in range(missing))]


def _metrics(reply: Message) -> MetricRecord:
    return records_of(reply.content, MetricRecord)[0]


def _common_metrics(replies: list[Message]) -> list[str]:
    """Return the metrics that all replies have, in one shape.

    Flower ends the run when they differ; an odd metric is no reason to lose training.
    """
    if not replies:
        return []
    shapes = [
        {name: np.shape(value) for name, value in _metrics(reply).items()}
        for reply in replies
    ]
    first = shapes[0]
    return [
        name
        for name, shape in first.items()
        if all(other.get(name) == shape for other in shapes)
    ]
