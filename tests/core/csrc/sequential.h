// The GPU's kernels as a loop: the threads of a block take turns, one block follows another (see
// csrc/cuda/thread.h).
//
// Each thread has a stack of its own and runs until it waits for others: for its block at a
// barrier, for its warp in an exchange. What a GPU would not forgive is an exception here: threads
// that wait for different things, that end while others wait for them, addresses that are not
// aligned. Shared memory is filled with junk before each block. The order in which threads and
// blocks run is chosen by `OTTAVA_GRID_ORDER` (ascending, descending, or the seed of a shuffle):
// results that depend on it are races.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace ottava::cuda {

typedef void* Stream;

struct LaunchError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

inline void require_aligned(const void* address, size_t bytes) {
    if (reinterpret_cast<uintptr_t>(address) % bytes != 0)
        throw LaunchError("a wide access to an address that is no multiple of " +
                          std::to_string(bytes));
}

namespace sequential {

constexpr size_t kStackBytes = 128 << 10;

// Where a stack goes on. A context has the mask of signals besides, which takes two system calls,
// so contexts only begin a stack; but the sanitizers do not follow jumps from one to the other.
#if defined(__SANITIZE_ADDRESS__)
typedef ucontext_t Place;
inline void change(Place& from, const Place& to) {
    swapcontext(&from, &to);
}
inline void begin(Place& from, const ucontext_t& to) {
    swapcontext(&from, &to);
}
#else
typedef jmp_buf Place;
inline void change(Place& from, Place& to) {
    if (_setjmp(from) == 0) _longjmp(to, 1);
}
inline void begin(Place& from, const ucontext_t& to) {
    if (_setjmp(from) == 0) setcontext(&to);
}
#endif

enum class Waiting { no, for_block, for_warp, ended };

struct Fiber {
    ucontext_t start;
    Place place;
    std::unique_ptr<char[]> stack;
    bool has_started = false;
    Waiting waiting = Waiting::no;
    uint32_t given;  // to the warp
};

class Block;

// The block that runs, for the entry of its fibers.
inline Block*& running() {
    static Block* block = nullptr;
    return block;
}

class Block {
    Place scheduler_;
    std::vector<Fiber> fibers_;
    std::exception_ptr error_;
    int current_ = 0;
    void (*body_)(void*, Block&, int) = nullptr;
    void* argument_ = nullptr;

    void enter(int thread) {
        current_ = thread;
        Fiber& fiber = fibers_[thread];
        const bool is_first = !std::exchange(fiber.has_started, true);
        // The sanitizers want to know of every change of stacks.
#if defined(__SANITIZE_ADDRESS__)
        void* fake = nullptr;
        __sanitizer_start_switch_fiber(&fake, fiber.stack.get(), kStackBytes);
#endif
        if (is_first)
            begin(scheduler_, fiber.start);
        else
            change(scheduler_, fiber.place);
#if defined(__SANITIZE_ADDRESS__)
        __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
    }

    // A fiber is a thread of each block in turn.
    static void entry() {
        Block& block = *running();
#if defined(__SANITIZE_ADDRESS__)
        __sanitizer_finish_switch_fiber(nullptr, &block.scheduler_stack_, &block.scheduler_size_);
#endif
        while (true) {
            try {
                block.body_(block.argument_, block, block.current_);
            } catch (...) {
                block.error_ = std::current_exception();
            }
            block.wait(Waiting::ended);
        }
    }

    void leave() {
        Fiber& self = fibers_[current_];
#if defined(__SANITIZE_ADDRESS__)
        void* fake = nullptr;
        __sanitizer_start_switch_fiber(&fake, scheduler_stack_, scheduler_size_);
        change(self.place, scheduler_);
        __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#else
        change(self.place, scheduler_);
#endif
    }

    bool all(size_t from, size_t to, Waiting waiting) const {
        return std::all_of(fibers_.begin() + from, fibers_.begin() + to,
                           [=](const Fiber& f) { return f.waiting == waiting; });
    }

    void release(size_t from, size_t to) {
        for (size_t k = from; k < to; ++k) fibers_[k].waiting = Waiting::no;
    }

public:
    const void* scheduler_stack_ = nullptr;
    size_t scheduler_size_ = 0;
    int64_t number = 0, blocks = 0;

    explicit Block(int threads) : fibers_(static_cast<size_t>(threads)) {
        for (Fiber& fiber : fibers_) {
            fiber.stack.reset(new char[kStackBytes]);
            getcontext(&fiber.start);
            fiber.start.uc_stack.ss_sp = fiber.stack.get();
            fiber.start.uc_stack.ss_size = kStackBytes;
            fiber.start.uc_link = nullptr;
            makecontext(&fiber.start, &Block::entry, 0);
        }
    }

    void wait(Waiting what) {
        fibers_[current_].waiting = what;
        const int self = current_;
        leave();
        current_ = self;
    }

    uint32_t exchange(int thread, uint32_t value, int mask) {
        fibers_[thread].given = value;
        wait(Waiting::for_warp);
        const uint32_t taken = fibers_[thread ^ mask].given;
        wait(Waiting::for_warp);  // nobody gives anew before all have taken
        return taken;
    }

    void run(void (*body)(void*, Block&, int), void* argument, const std::vector<int>& order) {
        body_ = body;
        argument_ = argument;
        release(0, fibers_.size());
        running() = this;
        const size_t count = fibers_.size();
        while (!all(0, count, Waiting::ended)) {
            bool moved = false;
            for (int thread : order) {
                if (fibers_[thread].waiting != Waiting::no) continue;
                enter(thread);
                moved = true;
                if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
            }
            for (size_t warp = 0; warp < count; warp += 32) {
                const size_t end = std::min(warp + 32, count);
                if (all(warp, end, Waiting::for_warp)) release(warp, end), moved = true;
            }
            if (all(0, count, Waiting::for_block)) release(0, count), moved = true;
            if (!moved)
                throw LaunchError(
                    "threads wait for others that wait for something else, or have ended");
        }
    }
};

inline std::vector<int64_t> ordered(int64_t count) {
    std::vector<int64_t> order(static_cast<size_t>(count));
    std::iota(order.begin(), order.end(), int64_t{0});
    const char* chosen = std::getenv("OTTAVA_GRID_ORDER");
    const std::string wanted = chosen == nullptr ? "ascending" : chosen;
    if (wanted == "ascending") return order;
    if (wanted == "descending")
        std::reverse(order.begin(), order.end());
    else
        std::shuffle(order.begin(), order.end(),
                     std::mt19937(static_cast<unsigned>(std::stoul(wanted))));
    return order;
}

}  // namespace sequential

class Thread {
    sequential::Block& block_;
    int index_;

public:
    Thread(sequential::Block& block, int index) : block_(block), index_(index) {}
    int index() const { return index_; }
    int64_t block() const { return block_.number; }
    int64_t blocks() const { return block_.blocks; }
    int lane() const { return index_ % 32; }
    int warp() const { return index_ / 32; }
    void barrier() const { block_.wait(sequential::Waiting::for_block); }
    uint32_t exchange(uint32_t value, int mask) const {
        return block_.exchange(index_, value, mask);
    }
    void raise(int32_t* to, int32_t value) const { *to = std::max(*to, value); }
    void add(int64_t* to, int64_t value) const { *to += value; }
};

template <class Kernel>
void launch(const Kernel& kernel, int64_t blocks, Stream) {
    if (blocks <= 0) return;
    if (blocks > INT32_MAX)
        throw LaunchError("a grid of " + std::to_string(blocks) + " blocks is too large");
    struct Argument {
        const Kernel& kernel;
        typename Kernel::Shared* shared;
    };
    const auto body = [](void* argument, sequential::Block& block, int thread) {
        const Argument& a = *static_cast<Argument*>(argument);
        a.kernel(Thread(block, thread), *a.shared);
    };
    struct Aligned {
        alignas(128) unsigned char bytes[sizeof(typename Kernel::Shared)];
    };
    const auto memory = std::make_unique<Aligned>();
    std::vector<int> threads;
    for (int64_t thread : sequential::ordered(Kernel::kThreads))
        threads.push_back(static_cast<int>(thread));
    sequential::Block block(Kernel::kThreads);
    block.blocks = blocks;
    for (int64_t number : sequential::ordered(blocks)) {
        memset(memory->bytes, 0xa5, sizeof(memory->bytes));
        Argument argument{kernel, reinterpret_cast<typename Kernel::Shared*>(memory->bytes)};
        block.number = number;
        block.run(body, &argument, threads);
    }
}

}  // namespace ottava::cuda
