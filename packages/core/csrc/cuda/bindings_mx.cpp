// The operations on MX blocks, and the last step of a product.
#include "bindings.h"
#include "operations.h"

namespace ottava::cuda {

void bind_mx(py::module_&) {}

}  // namespace ottava::cuda
