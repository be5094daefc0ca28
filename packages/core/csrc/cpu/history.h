// The history of amaxes moves up by one step. Include once, after amax.h.

OTTAVA_INLINE void history_vector(float* history, int64_t slots, u32v mask, f32v& largest) {
    const f32v older = load<f32v>(history + slots);
    store(history, (bits_as<u32v>(older) & mask) | (load<u32v>(history) & ~mask));
    largest = larger(older, largest);
}

// Where the bits of `moves` are set, an element takes the value of the element `slots` behind it.
// All of these values raise `largest`. `moves` and `largest` repeat after `width` elements, a
// multiple of kLanes.
void history_run(float* history, int64_t slots, int64_t n, const uint32_t* moves, float* largest,
                 int64_t width) {
    // The width for the three slots of a layer, whose masks and maxima stay in registers.
    constexpr int64_t kUsual = 3 * 16 / kLanes;
    int64_t i = 0;
    if (width == kUsual * kLanes) {
        u32v mask[kUsual];
        f32v best[kUsual];
        for (int64_t k = 0; k < kUsual; ++k) {
            mask[k] = load<u32v>(moves + k * kLanes);
            best[k] = load<f32v>(largest + k * kLanes);
        }
        for (; i + width <= n; i += width)
            for (int64_t k = 0; k < kUsual; ++k)
                history_vector(history + i + k * kLanes, slots, mask[k], best[k]);
        for (int64_t k = 0; k < kUsual; ++k) store(largest + k * kLanes, best[k]);
    }
    for (int64_t at = 0; i + kLanes <= n;
         i += kLanes, at = at + kLanes == width ? 0 : at + kLanes) {
        f32v best = load<f32v>(largest + at);
        history_vector(history + i, slots, load<u32v>(moves + at), best);
        store(largest + at, best);
    }
    for (; i < n; ++i) {
        const int64_t at = i % width;
        largest[at] = larger(history[i + slots], largest[at]);
        if (moves[at] != 0) history[i] = history[i + slots];
    }
}
