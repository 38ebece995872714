"""The part of the model that an inner strategy sees: not what it would spoil."""

from typing import TypeVar

from flwr.app import ArrayRecord

from flower_sap.errors import InnerStrategyError, PayloadError
from flower_sap.payload.dense import Arrays, Manifest, decode, encode
from flower_sap.payload.layout import Kind, kind_of

_Item = TypeVar("_Item")


class ShownModel:
    """Takes the model apart for an inner strategy, and puts it together again.

    Parameters
    ----------
    manifest : Manifest
        What the model is.
    is_optimizer : bool
        Whether the strategy makes optimizer steps.
    strategy_name : str
        Whom an error blames.
    """

    def __init__(
        self, manifest: Manifest, *, is_optimizer: bool, strategy_name: str
    ) -> None:
        self._name = strategy_name
        self._visible = [
            # An optimizer step can push a variance below zero (NaN from then on).
            kind is Kind.PARAMETER or (kind is Kind.STATISTIC and not is_optimizer)
            for kind in map(kind_of, manifest.arrays)
        ]
        self._manifest = Manifest(tuple(self._seen(list(manifest.arrays))))

    def _seen(self, items: list[_Item]) -> list[_Item]:
        return [
            item
            for item, is_visible in zip(items, self._visible, strict=True)
            if is_visible
        ]

    def of_record(self, arrays: ArrayRecord) -> ArrayRecord:
        """Return what is shown of an encoded model."""
        return ArrayRecord({name: arrays[name] for name in self._manifest.names})

    def of_arrays(self, arrays: Arrays) -> ArrayRecord:
        """Return what is shown of a model, encoded."""
        return encode(self._seen(arrays), self._manifest)

    def completed(self, given: ArrayRecord, hidden: Arrays) -> Arrays:
        """Return the inner strategy's model with the arrays that it did not see.

        Parameters
        ----------
        given : ArrayRecord
            What it returned.
        hidden : Arrays
            A whole model, which has the arrays that are not shown.

        Raises
        ------
        InnerStrategyError
            If it returned another model than it got.
        """
        try:
            shown = iter(decode(self._cast(given), self._manifest))
        except PayloadError as error:
            raise InnerStrategyError(
                f"{self._name} returned a bad model: {error}"
            ) from error
        return [
            next(shown) if is_visible else hidden[index]
            for index, is_visible in enumerate(self._visible)
        ]

    def _cast(self, given: ArrayRecord) -> ArrayRecord:
        """Return the arrays in the model's own dtypes."""
        names = self._manifest.names
        if list(given) != names:
            raise InnerStrategyError(
                f"{self._name} returned arrays {list(given)[:5]}, expected {names[:5]}"
            )
        cast = ArrayRecord()
        for spec in self._manifest.arrays:
            values = given[spec.name].numpy()
            if values.shape != spec.shape:
                raise InnerStrategyError(
                    f"{self._name} returned {spec.name!r} as {list(values.shape)}, "
                    f"expected {list(spec.shape)}"
                )
            cast.update(encode([values.astype(spec.dtype)], Manifest((spec,))))
        return cast
