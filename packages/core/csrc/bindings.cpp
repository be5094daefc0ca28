// The module `ottava._cpu`: the operations of cpu/kernels.h over raw pointers. No libtorch: the Python side passes
// addresses, sizes and codes, and owns every check on tensors. What is checked here is only what a code could mean.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "addresses.h"
#include "cpu/kernels.h"

namespace py = pybind11;

namespace {

using ottava::Address;
using ottava::at;
using ottava::dtype_of;
using ottava::fp8_of;
using ottava::size_of;

// Thread counts below one mean nothing; they come from a caller's mistake.
int threads_of(int threads) {
    if (threads < 1) throw std::invalid_argument("threads must be at least 1, not " + std::to_string(threads));
    return threads;
}

void amax(Address src, int dtype, int64_t n, Address out, int threads) {
    ottava::amax(at<const void>(src), dtype_of(dtype), size_of(n), at<float>(out), threads_of(threads));
}

void scale_from_amax(Address amax, int64_t n, float fp8_max, float epsilon, bool force_pow_2, Address scale,
                     Address scale_inv) {
    ottava::scales_from_amax(at<const float>(amax), size_of(n), fp8_max, epsilon, force_pow_2, at<float>(scale),
                             at<float>(scale_inv));
}

void cast(Address src, int dtype, int64_t n, Address scale, Address out, int format, int threads) {
    ottava::cast(at<const void>(src), dtype_of(dtype), size_of(n), at<const float>(scale), at<uint8_t>(out),
                 fp8_of(format), threads_of(threads));
}

void cast_transpose(Address src, int dtype, int64_t rows, int64_t cols, Address scale, Address out, Address out_t,
                    int format, int threads) {
    ottava::cast_transpose(at<const void>(src), dtype_of(dtype), size_of(rows), size_of(cols), at<const float>(scale),
                           at<uint8_t>(out), at<uint8_t>(out_t), fp8_of(format), threads_of(threads));
}

void quantize(Address src, int dtype, int64_t rows, int64_t cols, float epsilon, bool force_pow_2, Address amax,
              Address scale, Address scale_inv, Address out, Address out_t, int format, int threads) {
    ottava::quantize(at<const void>(src), dtype_of(dtype), size_of(rows), size_of(cols), epsilon, force_pow_2,
                     at<float>(amax), at<float>(scale), at<float>(scale_inv), at<uint8_t>(out), at<uint8_t>(out_t),
                     fp8_of(format), threads_of(threads));
}

void cast_amax(Address src, int dtype, int64_t rows, int64_t cols, Address scale, Address amax, Address saturated,
               Address scale_inv, Address out, Address out_t, int format, int threads) {
    ottava::cast_amax(at<const void>(src), dtype_of(dtype), size_of(rows), size_of(cols), at<const float>(scale),
                      at<float>(amax), at<int64_t>(saturated), at<float>(scale_inv), at<uint8_t>(out),
                      at<uint8_t>(out_t), fp8_of(format), threads_of(threads));
}

// One entry a tensor: the addresses of its scale and its history, and the number of its slots.
void update_scales(const std::vector<std::tuple<Address, Address, int64_t>>& tensors, int64_t length,
                   const std::vector<float>& maxima, bool most_recent, Address last) {
    std::vector<ottava::HistorySlots> slots;
    slots.reserve(tensors.size());
    int64_t total = 0;
    for (const auto& [scale, history, count] : tensors) {
        slots.push_back({at<float>(scale), at<float>(history), size_of(count)});
        total += count;
    }
    if (total != static_cast<int64_t>(maxima.size()))
        throw std::invalid_argument(std::to_string(maxima.size()) + " maxima for " + std::to_string(total) + " slots");
    ottava::update_scales(slots.data(), static_cast<int64_t>(slots.size()), size_of(length), maxima.data(), most_recent,
                          at<const float>(last));
}

void transpose(Address src, int64_t rows, int64_t cols, Address out, int threads) {
    ottava::transpose(at<const uint8_t>(src), size_of(rows), size_of(cols), at<uint8_t>(out), threads_of(threads));
}

void decode(Address src, int format, int64_t n, Address scale_inv, Address out, int dtype, int threads) {
    ottava::decode(at<const uint8_t>(src), fp8_of(format), size_of(n), at<const float>(scale_inv), at<void>(out),
                   dtype_of(dtype), threads_of(threads));
}

void mx_scale_from_amax(Address amax, int64_t n, int format, bool floor, Address codes, int threads) {
    ottava::mx_scales_from_amax(at<const float>(amax), size_of(n), fp8_of(format), floor, at<uint8_t>(codes),
                                threads_of(threads));
}

void mx_quantize(Address src, int dtype, int64_t rows, int64_t cols, int format, bool square, bool floor,
                 Address row_codes, Address row_scales, Address column_codes, Address column_scales, int threads) {
    ottava::mx_quantize(at<const void>(src), dtype_of(dtype), size_of(rows), size_of(cols), fp8_of(format), square,
                        floor, at<uint8_t>(row_codes), at<uint8_t>(row_scales), at<uint8_t>(column_codes),
                        at<uint8_t>(column_scales), threads_of(threads));
}

bool mx_decode(Address codes, Address scales, int format, int64_t rows, int64_t cols, bool columnwise, Address out,
               int dtype, int threads) {
    return ottava::mx_decode(at<const uint8_t>(codes), at<const uint8_t>(scales), fp8_of(format), size_of(rows),
                             size_of(cols), columnwise, at<void>(out), dtype_of(dtype), threads_of(threads));
}

// A tensor among many: its address, dtype and number of elements, and the dtype that its elements are rounded to.
using Source = std::tuple<Address, int, int64_t, int>;
// A shard: rows and columns of its matrix, and the element that it starts with.
using Place = std::tuple<int64_t, int64_t, int64_t>;

ottava::MultiSource source_of(const Source& source) {
    const auto& [address, dtype, count, nominal] = source;
    return {at<const void>(address), dtype_of(dtype), dtype_of(nominal), size_of(count)};
}

void check_place(const Place& place, int64_t count) {
    const auto& [rows, cols, start] = place;
    if (size_of(start) > size_of(rows) * size_of(cols) - count)
        throw std::invalid_argument("a shard is not within its matrix");
}

void multi_amax(const std::vector<Source>& tensors, Address out, int threads) {
    std::vector<ottava::MultiSource> jobs;
    jobs.reserve(tensors.size());
    for (const Source& source : tensors) jobs.push_back(source_of(source));
    ottava::multi_amax(jobs.data(), static_cast<int64_t>(jobs.size()), at<float>(out), threads_of(threads));
}

// One entry a tensor: the source, the format, and the address of its codes.
void multi_cast(const std::vector<std::tuple<Source, int, Address>>& tensors, Address scales, int threads) {
    std::vector<ottava::MultiCast> jobs;
    jobs.reserve(tensors.size());
    for (const auto& [source, format, out] : tensors)
        jobs.push_back({source_of(source), fp8_of(format), at<uint8_t>(out)});
    ottava::multi_cast(jobs.data(), static_cast<int64_t>(jobs.size()), at<const float>(scales), threads_of(threads));
}

void mx_multi_amax(const std::vector<std::tuple<Source, Place, bool>>& shards, Address out, int64_t total, int threads) {
    std::vector<ottava::MxMultiAmax> jobs;
    jobs.reserve(shards.size());
    int64_t needed = 0;
    for (const auto& [source, place, square] : shards) {
        const auto& [rows, cols, start] = place;
        jobs.push_back({source_of(source), rows, cols, start, square});
        check_place(place, jobs.back().source.count);
        needed += ottava::mx_amax_count(rows, cols, square);
    }
    if (needed != total)
        throw std::invalid_argument("place for " + std::to_string(total) + " of " + std::to_string(needed) + " amaxes");
    ottava::mx_multi_amax(jobs.data(), static_cast<int64_t>(jobs.size()), at<float>(out), threads_of(threads));
}

// One entry a shard: the format, and for rows and columns the addresses of scales and codes.
void mx_multi_cast(
    const std::vector<std::tuple<Source, Place, int, std::pair<Address, Address>, std::pair<Address, Address>>>& shards,
    int threads) {
    std::vector<ottava::MxMultiCast> jobs;
    jobs.reserve(shards.size());
    for (const auto& [source, place, format, by_row, by_column] : shards) {
        const auto& [rows, cols, start] = place;
        jobs.push_back({source_of(source), rows, cols, start, fp8_of(format), at<const uint8_t>(by_row.first),
                        at<uint8_t>(by_row.second), at<const uint8_t>(by_column.first), at<uint8_t>(by_column.second)});
        check_place(place, jobs.back().source.count);
    }
    ottava::mx_multi_cast(jobs.data(), static_cast<int64_t>(jobs.size()), threads_of(threads));
}

void epilogue(Address acc, int64_t rows, int64_t cols, Address scale_a, Address scale_b, Address bias, int bias_dtype,
              int threads) {
    ottava::epilogue(at<uint16_t>(acc), size_of(rows), size_of(cols), at<const float>(scale_a),
                     at<const float>(scale_b), at<const void>(bias), dtype_of(bias_dtype), threads_of(threads));
}

std::vector<std::string> available_isas() {
    const ottava::Kernels* available[8];
    const int count = ottava::available_kernels(available, 8);
    std::vector<std::string> names;
    for (int i = 0; i < count; ++i) names.emplace_back(available[i]->name);
    return names;
}

void set_isa(const std::string& name) {
    if (ottava::set_active_kernels(name.c_str())) return;
    std::string known;
    for (const std::string& other : available_isas()) known += (known.empty() ? "" : ", ") + other;
    throw std::invalid_argument("instruction set '" + name + "' is not available here; these are: " + known);
}

}  // namespace

PYBIND11_MODULE(_cpu, m) {
    using Unlocked = py::call_guard<py::gil_scoped_release>;
    m.doc() = "FP8 kernels for CPUs over raw addresses; ottava.kernels is the interface to use.";
    m.def("amax", &amax, Unlocked());
    m.def("scale_from_amax", &scale_from_amax, Unlocked());
    m.def("cast", &cast, Unlocked());
    m.def("cast_transpose", &cast_transpose, Unlocked());
    m.def("quantize", &quantize, Unlocked());
    m.def("cast_amax", &cast_amax, Unlocked());
    m.def("update_scales", &update_scales, Unlocked());
    m.def("transpose", &transpose, Unlocked());
    m.def("decode", &decode, Unlocked());
    m.def("mx_scale_from_amax", &mx_scale_from_amax, Unlocked());
    m.def("mx_quantize", &mx_quantize, Unlocked());
    m.def("mx_decode", &mx_decode, Unlocked());
    m.def("multi_amax", &multi_amax, Unlocked());
    m.def("multi_cast", &multi_cast, Unlocked());
    m.def("mx_multi_amax", &mx_multi_amax, Unlocked());
    m.def("mx_multi_cast", &mx_multi_cast, Unlocked());
    m.def("epilogue", &epilogue, Unlocked());
    m.def("isa", [] { return std::string(ottava::active_kernels().name); });
    m.def("available_isas", &available_isas);
    m.def("set_isa", &set_isa);
}
