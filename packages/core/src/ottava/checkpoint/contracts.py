"""The contracts of quantized tensors in files, and the warning about a load under another one.

The description of a file has each contract once, by its hash, and the entry of each tensor has the
hash. A contract that is not stated is not written.
"""

import warnings
from collections.abc import Iterable, Mapping

from ottava.contract import NOTHING_STATED, VERSION, Contract
from ottava.errors import OptionError, listed
from ottava.tensors.storage import QuantizedTensorStorage

#: Contracts as JSON values, by their hashes.
Table = dict[str, dict[str, object]]
_FROM_OUTSIDE = ("given", "given-fitting")


def contract_of(storage: QuantizedTensorStorage) -> Contract | None:
    """The contract of the bytes of a storage: that of its quantizer, or else that of the file which
    it comes from; None where nothing is stated."""
    contract: Contract | None = storage.saved_contract
    if storage._quantizer is not None:
        contract = storage._quantizer.contract
    return None if contract == NOTHING_STATED else contract


def table_of(contracts: Iterable[Contract]) -> Table:
    """Contracts by their hashes."""
    return {contract.hash: contract.value() for contract in contracts}


def contracts_in(table: object) -> dict[str, Contract]:
    """The contracts of a table in a file. Those of a later version are left out.

    Raises:
        ValueError, TypeError: it is no table, or one of them is no contract, or has another hash.
    """
    if not isinstance(table, dict):
        raise TypeError("the contracts are no object")
    contracts = {}
    for name, value in table.items():
        if isinstance(value, dict) and value.get("version") != VERSION:
            continue
        try:
            contracts[name] = Contract.of_value(value)
        except OptionError as error:
            raise ValueError(str(error)) from error
        if contracts[name].hash != name:
            raise ValueError(f"the contract {name!r:.80} has another hash")
    return contracts


def warn_of_other_contracts(pairs: Mapping[str, tuple[Contract | None, Contract | None]]) -> None:
    """Warn of tensors whose bytes a file has under another contract than the model's.

    One warning serves all tensors that differ in the same fields.

    Args:
        pairs: name of a tensor -> the contract of the file, and that of the model.
    """
    groups: dict[str, list[str]] = {}
    for name, (saved, present) in pairs.items():
        if saved is not None and present is not None:
            words = _differences(saved, present)
            if words:
                groups.setdefault("; ".join(words), []).append(name)
    for differences, names in groups.items():
        warnings.warn(
            f"{listed(names)}: the file has bytes of another contract than the model: "
            f"{differences}. "
            f"What is quantized from now on has the model's. To go on as before, make the model "
            f"with the recipe and the options that were saved.",
            UserWarning,
            stacklevel=4,
        )


def _differences(saved: Contract, present: Contract) -> list[str]:
    """The fields that differ, in words.

    Whose amaxes decide a scale is left out, because it does not tell the bytes of a whole tensor
    apart, and so is whether a scale from outside may be lowered.
    """
    return [
        f"{field} is {before!r} in the file and {now!r} in the model"
        for field, (before, now) in saved.differences(present).items()
        if not field.endswith("amax.ranks")
        and not (before in _FROM_OUTSIDE and now in _FROM_OUTSIDE)
    ]
