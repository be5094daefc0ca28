// Kernels over runs of elements: partial amaxes, and the cast.
#pragma once

#include <cstdint>

#include "scaling.h"

namespace ottava::cuda {

// The number of bytes at the end of a tensor that the second-level cache is assumed to hold after
// the tensor was read. A cast that follows reads these bytes first.
constexpr int64_t kCachedBytes = 32 << 20;

struct NoShared {};

// The number of blocks on a multiprocessor with which a whole grid (kMaxPartials) runs at once on
// 128 multiprocessors. Ada's multiprocessors have room for fewer threads.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 890
constexpr int kAmaxBlocks = 3;
#else
constexpr int kAmaxBlocks = 4;
#endif

// One partial amax for each block, over groups that lie a grid apart.
template <class Source>
struct PartialAmax {
    static constexpr int kThreads = 512, kBlocksPerMultiprocessor = kAmaxBlocks, kUnroll = 4;
    typedef BlockLargest<kThreads> Shared;
    const void* src;
    int64_t count;
    bool wide;
    float* partial;

    static int blocks_for(int64_t count) {
        const int64_t blocks = ceil_div(count, int64_t{kThreads} * kGroup * kUnroll);
        return static_cast<int>(blocks < 1 ? 1 : blocks > kMaxPartials ? kMaxPartials : blocks);
    }

    template <class Thread>
    OTTAVA_DEVICE void operator()(const Thread& thread, Shared& shared) const {
        const uint32_t best = wide ? of_groups(thread) : of_elements(thread);
        const uint32_t largest = shared(thread, bits_as<uint32_t>(Source::largest(best)));
        if (thread.index() == 0) partial[thread.block()] = bits_as<float>(largest);
    }

private:
    template <class Thread>
    OTTAVA_DEVICE uint32_t of_groups(const Thread& thread) const {
        uint32_t best = 0;
        const int64_t step = thread.blocks() * kThreads * kGroup;
        const int64_t cached_from = count - kCachedBytes / Source::bytes,
                      round = (kUnroll - 1) * step + kGroup;
        int64_t i = (thread.block() * kThreads + thread.index()) * kGroup;
        for (; i + round <= cached_from; i += kUnroll * step) best = observed<false>(best, i, step);
        for (; i + round <= count; i += kUnroll * step) best = observed<true>(best, i, step);
        for (; i + kGroup <= count; i += step)
            best = load_whole<Source, true>(src, i).observe(best);
        for (; i < count; ++i) best = Source::observe(best, Source::load(src, i));
        return best;
    }

    // All loads of a round are issued before the first result is used.
    template <bool Kept>
    OTTAVA_DEVICE uint32_t observed(uint32_t best, int64_t i, int64_t step) const {
        Group<Source> groups[kUnroll];
#pragma unroll
        for (int k = 0; k < kUnroll; ++k) groups[k] = load_whole<Source, Kept>(src, i + k * step);
#pragma unroll
        for (int k = 0; k < kUnroll; ++k) best = groups[k].observe(best);
        return best;
    }

    template <class Thread>
    OTTAVA_DEVICE uint32_t of_elements(const Thread& thread) const {
        uint32_t best = 0;
        const int64_t step = thread.blocks() * kThreads;
#pragma unroll 4
        for (int64_t i = thread.block() * kThreads + thread.index(); i < count; i += step)
            best = Source::observe(best, Source::load(src, i));
        return best;
    }
};

// The scale of a tensor from partial amaxes, computed by one block that casts nothing.
struct FinishAmax {
    static constexpr int kThreads = 256, kBlocksPerMultiprocessor = 1;
    typedef BlockLargest<kThreads> Shared;
    const float* partial;
    int count;
    float* amax;

    template <class Thread>
    OTTAVA_DEVICE void operator()(const Thread& thread, Shared& shared) const {
        const uint32_t largest = shared(thread, largest_part<kThreads>(thread, partial, count));
        if (thread.index() == 0) *amax = bits_as<float>(largest);
    }
};

// The cast of a run; if `out` is null, elements are only observed. The last chunks are cast first,
// because the caches hold them after an amax.
template <class Source, class Format, class Scaling>
struct Cast {
    static constexpr int kThreads = 256, kBlocksPerMultiprocessor = 4, kUnroll = 4, kRounds = 2;
    static constexpr int64_t kRound = int64_t{kThreads} * kGroup * kUnroll,
                             kChunk = kRound * kRounds;
    typedef typename Scaling::template Shared<kThreads> Shared;
    const void* src;
    int64_t count;
    bool wide;
    uint8_t* out;
    Scaling scaling;

    // There is at least one block, because a block writes the scale.
    static int64_t blocks_for(int64_t count) { return count == 0 ? 1 : ceil_div(count, kChunk); }

    template <class Thread>
    OTTAVA_DEVICE void operator()(const Thread& thread, Shared& shared) const {
        int64_t at = (thread.blocks() - 1 - thread.block()) * kChunk;
        const int64_t end = at + kChunk < count ? at + kChunk : count;
        // The first loads are issued before the kernel waits for the scale.
        Group<Source> batch[kUnroll];
        bool whole = load(batch, at, thread);
        const float scale = scaling.template get<Format, kThreads>(thread, shared);
        uint32_t best = 0;
        int clamped = 0;
#pragma unroll 1
        while (true) {
            if (whole)
                groups(batch, at + thread.index() * kGroup, scale, best, clamped);
            else
                elements(at + thread.index(), at + kRound < count ? at + kRound : count, scale,
                         best, clamped);
            at += kRound;
            if (at >= end) break;
            whole = load(batch, at, thread);
        }
        scaling.template leave<kThreads>(thread, shared, Source::largest(best), clamped);
    }

private:
    // Loads a round if it is whole, and returns whether it is.
    template <class Thread>
    OTTAVA_DEVICE bool load(Group<Source> (&batch)[kUnroll], int64_t at,
                            const Thread& thread) const {
        if (!wide || at + kRound > count) return false;
        const int64_t first = at + thread.index() * kGroup;
#pragma unroll
        for (int k = 0; k < kUnroll; ++k)
            batch[k] = load_whole<Source>(src, first + k * kThreads * kGroup);
        return true;
    }

    OTTAVA_DEVICE void groups(const Group<Source> (&batch)[kUnroll], int64_t first, float scale,
                              uint32_t& best, int& clamped) const {
        uint32_t here = 0;
#pragma unroll
        for (int k = 0; k < kUnroll; ++k) {
            here = batch[k].observe(here);
            if (out != nullptr)
                store_whole(out, first + k * kThreads * kGroup,
                            encode_group<Format>(batch[k], scale));
        }
        best = Source::merge(best, here);
        if (!scaling.counts() || !clamps<Format>(Source::largest(here), scale)) return;
#pragma unroll 1
        for (int k = 0; k < kUnroll; ++k)
            clamped +=
                clamped_of<Format, Source>(src, first + k * kThreads * kGroup, kGroup, scale);
    }

    OTTAVA_DEVICE void elements(int64_t first, int64_t end, float scale, uint32_t& best,
                                int& clamped) const {
#pragma unroll 1
        for (int64_t i = first; i < end; i += kThreads) {
            const uint32_t element = Source::load(src, i);
            const float value = Source::widen(element);
            best = Source::observe(best, element);
            if (scaling.counts() && beyond<Format>(value, scale)) ++clamped;
            if (out != nullptr) out[i] = encode_one<Format, Source>(element, scale);
        }
    }
};

}  // namespace ottava::cuda
