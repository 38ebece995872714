"""The versions of the model: the current one, its messages, and what is released."""

from flwr.app import ArrayRecord, RecordDict

from flower_sap._flower import num_content_bytes
from flower_sap.errors import InnerStrategyError, PayloadError
from flower_sap.payload.dense import Arrays, decode, encode
from flower_sap.strategies.inner import InnerStrategy
from flower_sap.strategies.parts import Inputs
from flower_sap.strategies.release import Released, ReleaseRule
from flower_sap.strategies.state import ServerState


class Versions:
    """The model of one run, version by version.

    Parameters
    ----------
    state : ServerState
        Holds the current version.
    inner : InnerStrategy
        Decorates train messages.
    inputs : Inputs
        The first model, and the config of train messages.
    release : ReleaseRule
        Which model is evaluated and returned.
    """

    def __init__(
        self,
        state: ServerState,
        inner: InnerStrategy,
        inputs: Inputs,
        release: ReleaseRule,
    ) -> None:
        self._state = state
        self._inner = inner
        self._config = inputs.train_config
        self.manifest = inputs.manifest
        self._record = ArrayRecord(dict(inputs.arrays))
        self._released = Released(release, state.arrays, inputs.manifest)
        self._template: tuple[str, RecordDict, int] | None = None

    def train_template(self) -> tuple[str, RecordDict, int]:
        """Return type, content and bytes of this version's train messages."""
        if self._template is None:
            message_type, content = self._inner.train_content(
                self._state.version + 1,
                self._record,
                self._config,
                list(self._state.nodes),
            )
            self._template = message_type, content, num_content_bytes(content)
        return self._template

    def publish(self, arrays: Arrays, num_updates: int) -> None:
        """Make `arrays`, of `num_updates` updates, the next version."""
        state = self._state
        self._record = encode(arrays, self.manifest)
        try:
            state.arrays = decode(self._record, self.manifest)
        except PayloadError as error:
            raise InnerStrategyError(
                f"version {state.version + 1} would not be finite ({error}); lower "
                "the learning rates of clients or server"
            ) from error
        state.version += 1
        self._template = None
        self._released.follow(
            state.arrays,
            num_updates=num_updates,
            num_nodes=max(1, len(state.nodes)),
            version=state.version,
        )

    def released(self) -> ArrayRecord:
        """Return the model that is evaluated and returned."""
        arrays = self._released.arrays
        if arrays is self._state.arrays:  # the latest version, encoded already
            return self._record
        return encode(arrays, self.manifest)
