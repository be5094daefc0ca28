"""The tensors of a layer's three products, by nvdlfw-inspect's names."""

#: GEMM -> its operands and its result, by nvdlfw-inspect's names.
TENSORS = {
    "fprop": ("activation", "weight", "output"),
    "dgrad": ("gradient", "weight", "dgrad"),
    "wgrad": ("gradient", "activation", "wgrad"),
}
#: nvdlfw-inspect's name of an operand -> the recipes' name.
ROLES = {"activation": "input", "weight": "weight", "gradient": "grad_output"}
#: Operands of the three products, as ``(gemm, tensor)``.
OPERANDS = tuple(
    (gemm_type, tensor) for gemm_type, tensors in TENSORS.items() for tensor in tensors[:2]
)
#: The operands whose columnwise data the products read; they read rowwise data of the others.
BY_COLUMN = frozenset({("dgrad", "weight"), ("wgrad", "gradient"), ("wgrad", "activation")})
