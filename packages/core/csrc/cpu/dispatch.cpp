// The instruction sets that this machine has, and the one in use.
#include <atomic>
#include <cstring>

#include "kernels.h"

namespace ottava {
namespace {

std::atomic<const Kernels*> active{nullptr};

}  // namespace

int available_kernels(const Kernels** out, int capacity) {
    int count = 0;
    const auto add = [&](const Kernels& kernels) {
        if (count < capacity) out[count++] = &kernels;
    };
#if defined(OTTAVA_X86)
    // The builtins also check that the operating system saves the wide registers.
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        add(kAvx512);
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) add(kAvx2);
#endif
#if defined(OTTAVA_NEON)
    add(kNeon);  // part of every 64-bit ARM
#endif
    add(kPortable);
    return count;
}

const Kernels& active_kernels() {
    const Kernels* kernels = active.load(std::memory_order_relaxed);
    if (kernels == nullptr) {
        available_kernels(&kernels, 1);
        active.store(kernels, std::memory_order_relaxed);
    }
    return *kernels;
}

bool set_active_kernels(const char* name) {
    const Kernels* available[8];
    const int count = available_kernels(available, 8);
    for (int i = 0; i < count; ++i) {
        if (std::strcmp(available[i]->name, name) != 0) continue;
        active.store(available[i], std::memory_order_relaxed);
        return true;
    }
    return false;
}

}  // namespace ottava
