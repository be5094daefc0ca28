// The operations on many tensors, and on the state of delayed scaling.
#include "bindings.h"
#include "operations.h"

namespace ottava::cuda {

void bind_multi(py::module_&) {}

}  // namespace ottava::cuda
