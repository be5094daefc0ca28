"""What the backward pass of a layer reads of its operands: the words of recipes.

====================  ===========================  ==========================  ==============
word                  dgrad and wgrad read         saved of input and weight   ``grad_output``
====================  ===========================  ==========================  ==============
``quantized``         columns of the operands      these columns               quantized
``high_precision``    the operands as they came    the operands themselves     not quantized
``dequantized``       the values that fprop read   the rows that fprop read    not quantized
====================  ===========================  ==========================  ==============
"""

from dataclasses import replace
from typing import Any

from ottava.errors import OptionError
from ottava.recipes.role import OF_LINEAR, Explanation

QUANTIZED = "quantized"
HIGH_PRECISION = "high_precision"
DEQUANTIZED = "dequantized"
#: The values of :attr:`ottava.recipes.Recipe.backward`.
WORDS = (QUANTIZED, HIGH_PRECISION, DEQUANTIZED)
#: (product, tensor type) -> the word for what the product reads of it.
Reads = dict[tuple[str, str], str]

#: Tensor type -> the products of the backward pass that read it.
READERS = {"input": ("wgrad",), "weight": ("dgrad",), "grad_output": ("dgrad", "wgrad")}
#: The reads of a recipe that says nothing.
ALL_QUANTIZED: Reads = {
    (gemm, tensor_type): QUANTIZED for tensor_type in OF_LINEAR for gemm in READERS[tensor_type]
}


# Any, because the module of Recipe imports this one.
def check_backward(recipe: Any) -> None:
    """Refuse an unknown word of a recipe, and one that contradicts ``wgrad_high_precision``.

    Raises:
        OptionError: it is refused.
    """
    if recipe.backward not in WORDS:
        raise OptionError(f"backward is {recipe.backward!r}", expected=f"one of {', '.join(WORDS)}")
    if recipe.backward == DEQUANTIZED and recipe.wgrad_high_precision:
        raise OptionError(
            f"backward is {DEQUANTIZED!r}, and wgrad_high_precision is True: wgrad would read two "
            f"values of the input",
            expected="one of the two options",
            remedy=f"leave one out, or use backward={HIGH_PRECISION!r}",
        )


def reads_of_word(word: str, tensor_type: str) -> Reads:
    """What the products of the backward pass read of a tensor; empty for one that they do not
    read."""
    if tensor_type == "grad_output" and word == DEQUANTIZED:
        word = HIGH_PRECISION
    return {(gemm, tensor_type): word for gemm in READERS.get(tensor_type, ())}


def in_words(reads: Reads, explanation: Explanation) -> Explanation:
    """A description of what serves a role, with what ``reads`` says of the backward pass; unchanged
    where that reads quantized tensors."""
    rowwise, columnwise = explanation.rowwise, explanation.columnwise
    for (gemm, tensor_type), word in reads.items():
        if word == DEQUANTIZED:
            columnwise = f"{rowwise}, dequantized"
        elif word == HIGH_PRECISION and (gemm, tensor_type) == ("dgrad", "grad_output"):
            rowwise = "high precision"
        elif word == HIGH_PRECISION:
            columnwise = "high precision"
    return replace(explanation, rowwise=rowwise, columnwise=columnwise)
