// The history of amaxes moves up by one step. Include once, after amax.h.

// In place: elements take the one `slots` behind them where it `moves`, whose bits are all set then, and raise `largest`.
// Both of these repeat themselves after `width` elements, a multiple of kLanes.
void history_run(float* history, int64_t slots, int64_t n, const uint32_t* moves, float* largest, int64_t width) {
    int64_t i = 0;
    for (int64_t at = 0; i + kLanes <= n; i += kLanes, at = at + kLanes == width ? 0 : at + kLanes) {
        const f32v older = load<f32v>(history + i + slots);
        const u32v kept = load<u32v>(history + i), mask = load<u32v>(moves + at);
        store(history + i, (bits_as<u32v>(older) & mask) | (kept & ~mask));
        store(largest + at, larger(older, load<f32v>(largest + at)));
    }
    for (; i < n; ++i) {
        const int64_t at = i % width;
        largest[at] = larger(history[i + slots], largest[at]);
        if (moves[at] != 0) history[i] = history[i + slots];
    }
}
