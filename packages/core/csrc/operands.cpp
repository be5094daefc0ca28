// Quantizing an operand of a layer, and multiplying two, in one call from Python: tensors are read,
// allocated and written here. Each function returns None where a tensor is no plain memory of a
// CPU, or somebody looks at operators: Python does it then.
#include "operands.h"

#include <algorithm>
#include <exception>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "addresses.h"
#include "cpu/kernels.h"
#include "exchange.h"
#include "numerics.h"

namespace py = pybind11;

namespace ottava {

namespace {

// One direction of a grid: blocks, and whether its data and scales are the transpose's.
struct GridDirection {
    int64_t rows, cols, shared_rows, shared_cols;
    bool turned;
};

// A layout, as kernels take it.
struct GridPlan {
    Stored element;
    ScaleRule rule;
    bool largest_of_input;
    GridDirection directions[2];
};

GridDirection direction_of(const py::tuple& side) {
    return {side[0].cast<int64_t>(), side[1].cast<int64_t>(), side[2].cast<int64_t>(),
            side[3].cast<int64_t>(), side[4].cast<bool>()};
}

GridPlan plan_of(int element, bool e8m0, bool floor, float epsilon, bool largest_of_input,
                 const py::tuple& row_side, const py::tuple& column_side) {
    const ScaleRule rule{e8m0, floor, epsilon, std::numeric_limits<float>::max()};
    return {stored_of(element),
            rule,
            largest_of_input,
            {direction_of(row_side), direction_of(column_side)}};
}

// The largest finite value of a dtype.
float largest_of(Dtype dtype) {
    if (dtype == Dtype::float16) return 65504.0f;
    return dtype == Dtype::bfloat16 ? 3.3895313892515355e38f : std::numeric_limits<float>::max();
}

// What is read, contiguous.
class Source {
public:
    // False where Python has to do it, or with a Python error.
    bool open(PyObject* object) {
        if (torch.exchange == nullptr || !view_of(object, view) || !ottava::dtype_of(view, dtype) ||
            observed())
            return false;
        gradients_ = gradients_enabled();
        if (!settled(object, view, gradients_)) return false;
        if (!view.contiguous()) {
            copy_.reset(PyObject_CallMethodNoArgs(object, torch.contiguous));
            if (copy_.get() == nullptr || !view_of(copy_.get(), view)) return false;
        }
        threads = torch_threads();
        return true;
    }

    // The address of a single element of the quantizer's state, or of a slot of a layer's; either
    // may be None.
    template <class T>
    bool state(PyObject* object, long slot, const dlpack::Type& type, T*& out) {
        out = nullptr;
        if (object == Py_None) return true;
        View found;
        if (!view_of(object, found) || !found.is(type)) return false;
        // Buffers of a layer's state are its own, and have neither gradients nor values that are
        // still to be negated.
        const bool fits = slot < 0 ? found.size == 1 && settled(object, found, gradients_)
                                   : found.rows() > 0 && slot < found.cols() && found.contiguous();
        if (fits) out = static_cast<T*>(found.data) + std::max(slot, 0L);
        return fits;
    }

    View view;
    Dtype dtype;
    int threads;

private:
    bool gradients_ = true;
    Owned copy_;
};

// Lets other threads of Python run meanwhile, where the work of this many elements takes longer
// than to ask for that.
class Unlocked {
public:
    explicit Unlocked(int64_t elements) {
        if (elements > kFew) unlocked_.emplace();
    }

private:
    static constexpr int64_t kFew = 1 << 15;  // a few microseconds
    std::optional<py::gil_scoped_release> unlocked_;
};

PyObject* python_does_it() {
    if (PyErr_Occurred() != nullptr) return nullptr;
    Py_RETURN_NONE;
}

// The memory of data with one scale.
struct PerTensor {
    uint8_t *data, *transposed;
    float* scale_inv;
};

// Results, in a tuple with None for what is not wanted.
template <int count>
class Results {
public:
    Results() : tuple_(PyTuple_New(count)) {
        for (int i = 0; i < count; ++i) PyTuple_SET_ITEM(tuple_.get(), i, Py_NewRef(Py_None));
    }

    // The memory of a new tensor; null with a Python error.
    void* add(int place, const int64_t* shape, int32_t ndim, const dlpack::Type& type) {
        View made;
        PyObject* tensor = allocate(shape, ndim, type, made);
        if (tensor == nullptr) {
            failed_ = true;
            return nullptr;
        }
        Py_DECREF(Py_None);
        PyTuple_SET_ITEM(tuple_.get(), place, tensor);
        return made.data;
    }

    // Data of the shape of `x`, or of its transpose [K, *leading].
    uint8_t* add_data(int place, const View& x, bool turned) {
        if (!turned || x.ndim < 2)
            return static_cast<uint8_t*>(add(place, x.shape, x.ndim, dlpack::kUint8));
        int64_t shape[kDims];
        shape[0] = x.shape[x.ndim - 1];
        for (int32_t dim = 1; dim < x.ndim; ++dim) shape[dim] = x.shape[dim - 1];
        return static_cast<uint8_t*>(add(place, shape, x.ndim, dlpack::kUint8));
    }

    // Data of rows and of columns, and beside both the one scale that they have.
    PerTensor add_per_tensor(const View& x, bool rowwise, bool turned) {
        PerTensor made{nullptr, nullptr, nullptr};
        if (rowwise) made.data = add_data(0, x, false);
        if (turned) made.transposed = add_data(2, x, true);
        const int place = rowwise ? 1 : 3;
        made.scale_inv = static_cast<float*>(add(place, nullptr, 0, dlpack::kFloat32));
        if (rowwise && turned && !failed_) repeat(1, 3);
        return made;
    }

    // Runs a kernel over so many elements, and gives the results.
    template <class Kernel>
    PyObject* after(int64_t elements, Kernel kernel) {
        if (failed_) return nullptr;
        const Unlocked unlocked(elements);
        kernel();
        return tuple_.release();
    }

    static constexpr int32_t kDims = 32;

private:
    void repeat(int from, int to) {
        PyObject* const tensor = PyTuple_GET_ITEM(tuple_.get(), from);
        Py_DECREF(PyTuple_GET_ITEM(tuple_.get(), to));
        PyTuple_SET_ITEM(tuple_.get(), to, Py_NewRef(tensor));
    }

    Owned tuple_;
    bool failed_ = false;
};

bool is_true(PyObject* object) {
    return object == Py_True;
}

// (x, scale, amax, saturated, format, rowwise, transposed, slot)
// -> (rowwise data, scale_inv, columnwise data, scale_inv), with the same scale_inv twice
PyObject* cast_operand(PyObject* const* given) {
    Source x;
    float *scale = nullptr, *amax = nullptr;
    int64_t* saturated = nullptr;
    const bool rowwise = is_true(given[5]), turned = is_true(given[6]);
    const long slot = PyLong_AsLong(given[7]);
    if (!x.open(given[0]) || (turned && (x.view.ndim == 0 || x.view.ndim > Results<4>::kDims)) ||
        given[1] == Py_None || !x.state(given[1], slot, dlpack::kFloat32, scale) ||
        !x.state(given[2], slot, dlpack::kFloat32, amax) ||
        !x.state(given[3], slot, dlpack::kInt64, saturated))
        return python_does_it();
    const Fp8 format = fp8_of(static_cast<int>(PyLong_AsLong(given[4])));
    Results<4> results;
    const PerTensor made = results.add_per_tensor(x.view, rowwise, turned);
    return results.after(x.view.size, [&] {
        cast(x.view.data, x.dtype, x.view.rows(), x.view.cols(), scale, amax, saturated,
             made.scale_inv, made.data, made.transposed, format, x.threads);
    });
}

// (x, format, epsilon, force_pow_2, rowwise, transposed)
// -> (rowwise data, scale_inv, columnwise data, scale_inv), with the same scale_inv twice
PyObject* quantize_operand(PyObject* const* given) {
    Source x;
    const bool rowwise = is_true(given[4]), turned = is_true(given[5]);
    if (!x.open(given[0]) || (turned && (x.view.ndim == 0 || x.view.ndim > Results<4>::kDims)))
        return python_does_it();
    const Fp8 format = fp8_of(static_cast<int>(PyLong_AsLong(given[1])));
    const float epsilon = static_cast<float>(PyFloat_AsDouble(given[2]));
    const bool force_pow_2 = is_true(given[3]);
    Results<4> results;
    const PerTensor made = results.add_per_tensor(x.view, rowwise, turned);
    return results.after(x.view.size, [&] {
        quantize(x.view.data, x.dtype, x.view.rows(), x.view.cols(), epsilon, force_pow_2, nullptr,
                 nullptr, made.scale_inv, made.data, made.transposed, format, x.threads);
    });
}

// (x, plan, rowwise, columnwise) -> (rowwise data, scales, columnwise data, scales)
PyObject* grid_operand(PyObject* const* given) {
    Source x;
    if (!x.open(given[0]) || x.view.size == 0 || x.view.ndim > Results<4>::kDims)
        return python_does_it();
    const GridPlan& plan = *py::handle(given[1]).cast<const GridPlan*>();
    ScaleRule rule = plan.rule;
    if (plan.largest_of_input) rule.largest = largest_of(x.dtype);
    const int64_t rows = x.view.rows(), cols = x.view.cols();
    Results<4> made;
    GridSide sides[2];
    int count = 0;
    for (int direction = 0; direction < 2; ++direction) {
        if (!is_true(given[2 + direction])) continue;
        const GridDirection& of = plan.directions[direction];
        int64_t shape[2] = {grid_blocks(rows, of.rows), grid_blocks(cols, of.cols)};
        if (of.turned) std::swap(shape[0], shape[1]);
        uint8_t* data = made.add_data(2 * direction, x.view, of.turned);
        void* scales =
            made.add(2 * direction + 1, shape, 2, rule.e8m0 ? dlpack::kUint8 : dlpack::kFloat32);
        sides[count++] = {of.rows,   of.cols, of.shared_rows, of.shared_cols,
                          of.turned, data,    scales};
    }
    return made.after(x.view.size, [&] {
        grid_quantize(x.view.data, x.dtype, rows, cols, plan.element, rule, sides, count,
                      x.threads);
    });
}

// What does not change between products of operands of the same layouts and shapes. Its memory for
// decoded values is that of the thread which made it, and serves this thread alone.
class ProductPlan {
public:
    ProductPlan(const py::object& left, const py::object& right, py::object multiply,
                py::object dtype, int finished)
        : sides{side_of(left), side_of(right)},
          multiply(std::move(multiply)),
          dtype(std::move(dtype)),
          thread(PyThread_get_thread_ident()),
          finishes(finished >= 0),
          scaled(!sides[0].folded || !sides[1].folded),
          out(finishes ? ottava::dtype_of(finished) : Dtype::float32) {
        View values[2];
        if (finishes && view_of(sides[0].values.ptr(), values[0]) &&
            view_of(sides[1].values.ptr(), values[1]))
            shape[0] = values[0].shape[0], shape[1] = values[1].shape[1];
    }

    // One operand: elements, whose values go to memory that the product reads.
    struct Side {
        Stored element;
        int64_t rows, cols;
        bool folded;  // whether scales are part of the values
        bool e8m0;
        int64_t block_rows, block_cols;
        void* out;
        Dtype dtype;
        py::object values;

        void decode(const void* data, const void* scales, int threads) const {
            if (folded)
                grid_decode(static_cast<const uint8_t*>(data), element, rows, cols, scales, e8m0,
                            block_rows, block_cols, out, dtype, threads);
            else
                ottava::decode(static_cast<const uint8_t*>(data), static_cast<Fp8>(element),
                               rows * cols, nullptr, out, dtype, threads);
        }
    };

    const Side sides[2];
    const py::object multiply;  // the Python function that multiplies the values
    const py::object dtype;     // and the dtype that it is called with
    const unsigned long thread;
    const bool finishes;          // whether torch's sums are finished here
    const bool scaled;            // by scales that multiply them
    const Dtype out;              // and the dtype of the result then
    int64_t shape[2] = {-1, -1};  // of the result

private:
    // Of a PlannedSide in gemm/planned.py.
    static Side side_of(const py::object& side) {
        return {stored_of(side.attr("element").cast<int>()),
                side.attr("height").cast<int64_t>(),
                side.attr("width").cast<int64_t>(),
                side.attr("folded").cast<bool>(),
                side.attr("e8m0").cast<bool>(),
                side.attr("block_rows").cast<int64_t>(),
                side.attr("block_columns").cast<int64_t>(),
                at<void>(side.attr("address").cast<Address>()),
                ottava::dtype_of(side.attr("dtype").cast<int>()),
                side.attr("values")};
    }
};

// What a product reads, contiguous.
class Read {
public:
    bool open(PyObject* object, bool gradients) {
        if (!view_of(object, view) || !settled(object, view, gradients)) return false;
        if (view.contiguous()) return true;
        copy_.reset(PyObject_CallMethodNoArgs(object, torch.contiguous));
        return copy_.get() != nullptr && view_of(copy_.get(), view);
    }

    View view;

private:
    Owned copy_;
};

// What a product is given: data and scales of both sides, and perhaps a bias.
struct ProductInputs {
    Read data[2], scales[2], bias;
    bool biased = false;
    Dtype bias_dtype = Dtype::float32;

    // (plan, data, scales, data, scales, bias). False where they do not fit the plan, or with a
    // Python error.
    bool open(const ProductPlan& plan, PyObject* const* given) {
        const bool gradients = gradients_enabled();
        for (int i = 0; i < 2; ++i) {
            const ProductPlan::Side& side = plan.sides[i];
            if (!data[i].open(given[1 + 2 * i], gradients) ||
                !scales[i].open(given[2 + 2 * i], gradients) ||
                data[i].view.size != side.rows * side.cols)
                return false;
            const bool scalar = scales[i].view.size == 1 && scales[i].view.is(dlpack::kFloat32);
            if (!side.folded && !scalar) return false;
        }
        biased = given[5] != Py_None;
        if (!biased) return true;
        return bias.open(given[5], gradients) && dtype_of(bias.view, bias_dtype) &&
               bias.view.ndim == 1 && (!plan.finishes || bias.view.size == plan.shape[1]);
    }
};

// Step 1: the values of both sides, in the plan's memory.
void decode_sides(const ProductPlan& plan, const ProductInputs& inputs, int threads) {
    const Unlocked unlocked(inputs.data[0].view.size + inputs.data[1].view.size);
    for (int i = 0; i < 2; ++i)
        plan.sides[i].decode(inputs.data[i].view.data, inputs.scales[i].view.data, threads);
}

// Step 2: torch's float32 sums. As torch.addmm does, sums that no scale multiplies begin with the
// bias. Null with a Python error.
PyObject* multiply_values(const ProductPlan& plan, const ProductInputs& inputs, int threads) {
    PyObject* const left = plan.sides[0].values.ptr();
    PyObject* const right = plan.sides[1].values.ptr();
    if (plan.scaled || !inputs.biased)
        return PyObject_CallMethodObjArgs(torch.module, torch.mm, left, right, nullptr);
    View sums;
    const Owned sums_from_bias(allocate(plan.shape, 2, dlpack::kFloat32, sums));
    if (sums_from_bias.get() == nullptr) return nullptr;
    {
        const Unlocked unlocked(sums.size);
        repeat32(inputs.bias.view.data, inputs.bias_dtype, plan.shape[0], plan.shape[1],
                 static_cast<float*>(sums.data), threads);
    }
    return PyObject_CallMethodObjArgs(sums_from_bias.get(), torch.addmm, left, right, nullptr);
}

// Step 3: the sums, times both scales, plus the bias, rounded once to the plan's dtype.
PyObject* finish_sums(const ProductPlan& plan, const ProductInputs& inputs, Owned& sums,
                      int threads) {
    View from;
    if (!view_of(sums.get(), from) || !from.is(dlpack::kFloat32) || from.ndim != 2 ||
        !from.contiguous())
        return python_does_it();
    View to = from;
    Owned rounded;
    if (plan.out != Dtype::float32) {
        rounded.reset(allocate(from.shape, from.ndim, type_of(plan.out), to));
        if (rounded.get() == nullptr) return nullptr;
    }
    const auto factor = [&](int i) {
        return plan.sides[i].folded ? nullptr
                                    : static_cast<const float*>(inputs.scales[i].view.data);
    };
    {
        const Unlocked unlocked(from.size);
        epilogue32(static_cast<const float*>(from.data), from.shape[0], from.shape[1], factor(0),
                   factor(1), inputs.biased ? inputs.bias.view.data : nullptr, inputs.bias_dtype,
                   to.data, plan.out, threads);
    }
    return (rounded.get() == nullptr ? sums : rounded).release();
}

// (plan, data, scales, data, scales, bias) -> the product
PyObject* planned_product(PyObject* const* given) {
    if (torch.exchange == nullptr || observed() || autocast_enabled()) return python_does_it();
    const ProductPlan& plan = *py::handle(given[0]).cast<const ProductPlan*>();
    ProductInputs inputs;
    if (plan.thread != PyThread_get_thread_ident() || !inputs.open(plan, given))
        return python_does_it();
    const int threads = torch_threads();
    decode_sides(plan, inputs, threads);
    if (!plan.finishes) {
        PyObject* const scale_a = plan.sides[0].folded ? Py_None : given[2];
        PyObject* const scale_b = plan.sides[1].folded ? Py_None : given[4];
        return PyObject_CallFunctionObjArgs(plan.multiply.ptr(), plan.sides[0].values.ptr(),
                                            plan.sides[1].values.ptr(), scale_a, scale_b, given[5],
                                            plan.dtype.ptr(), nullptr);
    }
    Owned sums(multiply_values(plan, inputs, threads));
    if (sums.get() == nullptr || !plan.scaled) return sums.release();
    return finish_sums(plan, inputs, sums, threads);
}

// A list or tuple; null with a Python error.
class Sequence {
public:
    explicit Sequence(PyObject* object)
        : held_(PySequence_Fast(object, "a sequence is expected")) {}
    Py_ssize_t size() const {
        return held_.get() == nullptr ? -1 : PySequence_Fast_GET_SIZE(held_.get());
    }
    PyObject* operator[](Py_ssize_t i) const { return PySequence_Fast_GET_ITEM(held_.get(), i); }

private:
    Owned held_;
};

// (scales, histories, maxima, most_recent, own) -> True: the tensors fit together, and have the
// next step's scales. Those of a layer's state, its own, have neither gradients nor values that are
// still to be negated.
PyObject* update_slots(PyObject* const* given) {
    const Sequence scales(given[0]), histories(given[1]), maxima(given[2]);
    if (torch.exchange == nullptr || scales.size() < 1 || histories.size() != scales.size() ||
        observed())
        return python_does_it();
    std::vector<HistorySlots> slots;
    slots.reserve(static_cast<size_t>(scales.size()));
    const bool own = is_true(given[4]), gradients = !own && gradients_enabled();
    int64_t length = 0, total = 0;
    for (Py_ssize_t i = 0; i < scales.size(); ++i) {
        View scale, history;
        if (!view_of(scales[i], scale) || !scale.is(dlpack::kFloat32) || scale.ndim != 1 ||
            !scale.contiguous() || !view_of(histories[i], history) ||
            !history.is(dlpack::kFloat32) || history.ndim != 2 || !history.contiguous() ||
            history.shape[1] != scale.size || history.shape[0] < 1 ||
            (i > 0 && history.shape[0] != length) ||
            !(own ||
              (settled(scales[i], scale, gradients) && settled(histories[i], history, gradients))))
            return python_does_it();
        length = history.shape[0], total += scale.size;
        slots.push_back(
            {static_cast<float*>(scale.data), static_cast<float*>(history.data), scale.size});
    }
    if (maxima.size() != total) return python_does_it();
    std::vector<float> limits;
    limits.reserve(static_cast<size_t>(total));
    for (Py_ssize_t i = 0; i < maxima.size(); ++i)
        limits.push_back(static_cast<float>(PyFloat_AsDouble(maxima[i])));
    if (PyErr_Occurred() != nullptr) return nullptr;
    {
        const Unlocked unlocked(length * total);
        update_scales(slots.data(), scales.size(), length, limits.data(), is_true(given[3]),
                      nullptr);
    }
    Py_RETURN_TRUE;
}

// What torch is asked, and how its tensors are read; false where this torch has no table that is
// understood.
bool connect(const py::object& exchange, const py::dict& names) {
    if (!PyCapsule_IsValid(exchange.ptr(), "dlpack_exchange_api")) return false;
    const auto* found = static_cast<const dlpack::Exchange*>(
        PyCapsule_GetPointer(exchange.ptr(), "dlpack_exchange_api"));
    if (found->version.major != 1 || found->view == nullptr) return false;
    const auto held = [&](const char* name) { return py::object(names[name]).release().ptr(); };
    torch.tensor = held("tensor"), torch.parameter = held("parameter");
    torch.modes = held("dispatch_modes"), torch.functions = held("function_modes");
    torch.transforms = held("transforms"), torch.tracing = held("tracing"),
    torch.profiling = held("profiling");
    torch.grad_enabled = held("grad_enabled"), torch.threads = held("threads"),
    torch.autocast = held("autocast");
    torch.module = held("torch"), torch.mm = PyUnicode_InternFromString("mm");
    torch.addmm = PyUnicode_InternFromString("addmm_");
    torch.is_neg = PyUnicode_InternFromString("is_neg"),
    torch.contiguous = PyUnicode_InternFromString("contiguous");
    torch.requires_grad = PyUnicode_InternFromString("requires_grad");
    torch.exchange = found;
    return true;
}

// `function` as Python calls it, with this number of arguments.
template <PyObject* (*function)(PyObject* const*), Py_ssize_t expected>
PyObject* called(PyObject*, PyObject* const* given, Py_ssize_t count) {
    if (count != expected)
        return PyErr_Format(PyExc_TypeError, "%zd arguments instead of %zd", count, expected);
    try {
        return function(given);
    } catch (const std::exception& error) {
        return PyErr_Format(PyExc_RuntimeError, "%s", error.what());
    }
}

template <PyObject* (*function)(PyObject* const*), Py_ssize_t expected>
PyMethodDef method(const char* name) {
    const auto fast = &called<function, expected>;
    return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(fast)), METH_FASTCALL,
            nullptr};
}

}  // namespace

void bind_operands(py::module_& m) {
    py::class_<GridPlan>(m, "GridPlan").def(py::init(&plan_of));
    py::class_<ProductPlan>(m, "ProductPlan")
        .def(py::init<const py::tuple&, const py::tuple&, py::object, py::object, int>());
    m.def("connect", &connect);
    // Without pybind's conversions, which would take longer than the rest.
    static PyMethodDef methods[] = {method<quantize_operand, 6>("quantize_operand"),
                                    method<cast_operand, 8>("cast_operand"),
                                    method<grid_operand, 4>("grid_quantize_operand"),
                                    method<planned_product, 6>("planned_product"),
                                    method<update_slots, 5>("update_slots"),
                                    {}};
    PyModule_AddFunctions(m.ptr(), methods);
}

}  // namespace ottava
