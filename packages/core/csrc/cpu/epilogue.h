// The last step of a product: float32 sums times a factor, plus a bias, rounded once. Include once,
// after simd.h.

template <Dtype To>
OTTAVA_INLINE void put_rounded(uint8_t* to, f32v x) {
    if constexpr (To == Dtype::float32)
        store(to, x);
    else if constexpr (To == Dtype::bfloat16)
        store_narrow16(to, bits_as<u32v>(encode_bfloat16<f32v, i32v>(x)));
    else
        store_narrow16(to, bits_as<u32v>(encode<Half, f32v, i32v>(x)));
}

template <Dtype To, bool Biased>
void epilogue_typed(const float* sums, int64_t n, float factor, const float* bias, void* out) {
    constexpr size_t width = To == Dtype::float32 ? 4 : 2;
    const f32v by = broadcast(factor);
    const auto step = [by](const float* sum, const float* add, uint8_t* to) {
        const f32v product = load<f32v>(sum) * by;
        const f32v result = Biased ? product + load<f32v>(add) : product;
        // Every NaN becomes the same NaN, as on GPUs.
        put_rounded<To>(to, result == result ? result : bits_as<f32v>(i32v{} + kQuietNan));
    };
    uint8_t* to = static_cast<uint8_t*>(out);
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes, to += kLanes * width)
        step(sums + i, bias + (Biased ? i : 0), to);
    if (i == n) return;
    float rest[kLanes] = {}, added[kLanes] = {};
    uint8_t results[kLanes * width];
    const auto count = static_cast<size_t>(n - i);
    memcpy(rest, sums + i, count * sizeof(float));
    if (Biased) memcpy(added, bias + i, count * sizeof(float));
    step(rest, added, results);
    memcpy(to, results, count * width);
}

void epilogue_run(const float* sums, int64_t n, float factor, const float* bias, void* out,
                  Dtype dtype) {
    const auto run = [&](auto typed, auto biased) {
        (bias == nullptr ? typed : biased)(sums, n, factor, bias, out);
    };
    if (dtype == Dtype::float32)
        run(epilogue_typed<Dtype::float32, false>, epilogue_typed<Dtype::float32, true>);
    else if (dtype == Dtype::bfloat16)
        run(epilogue_typed<Dtype::bfloat16, false>, epilogue_typed<Dtype::bfloat16, true>);
    else
        run(epilogue_typed<Dtype::float16, false>, epilogue_typed<Dtype::float16, true>);
}
