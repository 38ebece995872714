"""The wrapped Flower strategy, asked for what it is good at and nothing else.

It decorates the train message, aggregates and evaluates. Sampling and time are the
engine's, so the grid that it sees is a stand-in that only counts nodes. What it gets
is checked, and what it gives is checked and put back into the model's own dtypes.
"""

from collections.abc import Mapping
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import (
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedProx,
    FedYogi,
    Strategy,
)

from flower_sap._flower import quiet_sampling
from flower_sap.errors import InnerStrategyError
from flower_sap.payload.dense import Arrays, Manifest
from flower_sap.records import copy_records
from flower_sap.strategies.aggregation import (
    Aggregator,
    KeepAll,
    largest_counters,
)
from flower_sap.strategies.replies import (
    chosen_metrics,
    common_metrics,
    with_content,
    without_arrays,
)
from flower_sap.strategies.shown_model import ShownModel
from flower_sap.strategies.stand_in_grid import StandInGrid
from flower_sap.strategies.streaming_mean import StreamingMean
from flower_sap.strategies.wrapping import nodes_to_evaluate, nodes_to_train, setting

# A subclass that aggregates in its own way has another function here, and gets every
# update by itself.
_MEANS = (FedAvg.aggregate_train, FedProx.aggregate_train)
_OPTIMIZERS = tuple(
    strategy.aggregate_train for strategy in (FedAvgM, FedAdam, FedAdagrad, FedYogi)
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
        self._shown = ShownModel(
            manifest,
            is_optimizer=self._is_optimizer,
            strategy_name=type(strategy).__name__,
        )
        self.weighted_by: str = setting(strategy, "weighted_by_key", "num-examples")
        self._arrays_key: str = setting(strategy, "arrayrecord_key", "arrays")
        self._config_key: str = setting(strategy, "configrecord_key", "config")
        self.min_nodes = max(1, setting(strategy, "min_available_nodes", 1))

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
        needed = nodes_to_train(self._strategy)
        grid = StandInGrid(node_ids[:needed], needed)
        with quiet_sampling(f"{self._seed} train {step}"):
            messages = list(
                self._strategy.configure_train(
                    step,
                    self._shown.of_record(arrays),
                    ConfigRecord(dict(config)),
                    grid,
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

    def fresh_content(
        self, content: RecordDict, extra: Mapping[str, Any]
    ) -> RecordDict:
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

    def with_model(self, content: RecordDict, arrays: ArrayRecord) -> RecordDict:
        """Return a message's content with other arrays, its other records shared."""
        changed = RecordDict(dict(content))
        changed[self._arrays_key] = arrays
        return changed

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
            hidden = models[0][0]
        else:
            hidden = largest_counters([m for m, _ in models], current, self._manifest)
        return self._shown.completed(arrays, hidden), metrics

    def _rebuilt(
        self,
        models: list[tuple[Arrays, float]],
        replies: list[Message],
        *,
        is_streamed: bool,
    ) -> list[Message]:
        common = common_metrics(replies)
        rebuilt = []
        for (arrays, num_examples), reply in zip(models, replies, strict=False):
            metrics = (
                MetricRecord({self.weighted_by: num_examples})
                if is_streamed
                else chosen_metrics(reply, common)
            )
            content = RecordDict(
                {self._arrays_key: self._shown.of_arrays(arrays), "metrics": metrics}
            )
            rebuilt.append(with_content(reply, content))
        return rebuilt

    def _train_metrics(self, replies: list[Message]) -> MetricRecord | None:
        average = getattr(self._strategy, "train_metrics_aggr_fn", None)
        if average is None:
            return None
        common = common_metrics(replies)
        records = [
            RecordDict({"metrics": chosen_metrics(reply, common)}) for reply in replies
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
        grid = StandInGrid(node_ids, nodes_to_evaluate(self._strategy))
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
        common = common_metrics(replies)
        rebuilt = [without_arrays(r, chosen_metrics(r, common)) for r in replies]
        with quiet_sampling(f"{self._seed} metrics {round_}"):
            return self._strategy.aggregate_evaluate(round_, rebuilt)
