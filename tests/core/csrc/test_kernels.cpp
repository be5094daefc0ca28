// Every kernel of every instruction set that this machine has, against scalar arithmetic and
// definitions.
//
// All buffers are exactly as large as the kernels may use and end where the allocation ends, so
// that under the address sanitizer one byte too far is a failure. Exits with 1 after printing what
// differed.
#include <cstdio>

#include "checking.h"
#include "subjects.h"

int main() {
    test_element_numerics();
    test_grid_numerics();
    const Kernels* available[8];
    const int count = available_kernels(available, 8);
    for (int i = 0; i < count; ++i) {
        if (!set_active_kernels(available[i]->name)) report("set_active_kernels", i, 0, 1);
        test_elements();
        test_mx();
        test_many();
        test_grids();
        std::printf("%s: done\n", available[i]->name);
    }
    if (set_active_kernels("no such set")) report("set_active_kernels of an unknown name", 0, 1, 0);
    std::printf(failures == 0 ? "all kernels agree\n" : "%ld differences\n", failures);
    return failures == 0 ? 0 : 1;
}
