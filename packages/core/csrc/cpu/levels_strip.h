// Kernels over strips: quantization with small elements, and decoding. Include once, after
// rounding.h.
//
// A strip is computed by position: the vectors of one position hold its lanes, so that a block of
// one lane needs nothing of other lanes, and no result depends on the width of a vector. Rows are
// transposed when they are read, and words of their codes when they are written.

constexpr int kVectors = kStripLanes / kLanes;  // of one position
constexpr int kWords = kStripPositions / 4;     // of 32 bits, with the codes of one lane

typedef uint64_t u64v __attribute__((vector_size(OTTAVA_VECTOR_BYTES)));

typedef float Values[kStripLanes];
typedef uint32_t Words[kStripLanes];

// What is known of a strip, by position and lane.
struct Strip {
    alignas(64) Values values[kStripPositions];
    alignas(64) Words random[kStripPositions];
    alignas(64) Words codes[kWords];
    alignas(64) Words scales[kStripPositions / 16];  // as they are stored, of each block
};

OTTAVA_INLINE int64_t multiple_of(int64_t n, int64_t step) {
    return (n + step - 1) / step * step;
}

// -- reading --

// Transposes a square of elements whose side is 16 bytes: perfect shuffles, as in tiles.h.
typedef uint16_t u16x8 __attribute__((vector_size(16)));
typedef uint32_t u32x4 __attribute__((vector_size(16)));

OTTAVA_INLINE void transpose_square(u16x8* rows) {
#pragma GCC unroll 16
    for (int round = 0; round < 3; ++round) {
        u16x8 next[8];
#pragma GCC unroll 16
        for (int k = 0; k < 4; ++k) {
            next[2 * k] = __builtin_shufflevector(rows[k], rows[k + 4], 0, 8, 1, 9, 2, 10, 3, 11);
            next[2 * k + 1] =
                __builtin_shufflevector(rows[k], rows[k + 4], 4, 12, 5, 13, 6, 14, 7, 15);
        }
#pragma GCC unroll 16
        for (int k = 0; k < 8; ++k) rows[k] = next[k];
    }
}

OTTAVA_INLINE void transpose_square(u32x4* rows) {
    for (int round = 0; round < 2; ++round) {
        u32x4 next[4];
        for (int k = 0; k < 2; ++k) {
            next[2 * k] = __builtin_shufflevector(rows[k], rows[k + 2], 0, 4, 1, 5);
            next[2 * k + 1] = __builtin_shufflevector(rows[k], rows[k + 2], 2, 6, 3, 7);
        }
        for (int k = 0; k < 4; ++k) rows[k] = next[k];
    }
}

template <class Element>
OTTAVA_INLINE void widen_position(const typename Element::storage* from, Values& to) {
    for (int k = 0; k < kVectors; ++k)
        store(to + k * kLanes, Element::load_floats(from + k * kLanes));
}

template <class Element>
void read_columns(const LevelsDirection& direction, const LevelsStrip& strip, Strip& work) {
    typedef typename Element::storage Storage;
    const auto* src = static_cast<const Storage*>(direction.src) +
                      strip.position * direction.position_step + strip.lane;
    const int64_t step = direction.position_step;
    for (int64_t i = 0; i < strip.positions; ++i) {
        const Storage* from = src + i * step;
        __builtin_prefetch(from + strip.ahead, 0, 2);
        if (strip.lanes == kStripLanes) {
            widen_position<Element>(from, work.values[i]);
            continue;
        }
        Storage some[kStripLanes] = {};
        memcpy(some, from, static_cast<size_t>(strip.lanes) * sizeof(Storage));
        widen_position<Element>(some, work.values[i]);
    }
}

template <class Element>
void read_rows(const LevelsDirection& direction, const LevelsStrip& strip, Strip& work) {
    typedef typename Element::storage Storage;
    typedef std::conditional_t<sizeof(Storage) == 2, u16x8, u32x4> Vector;
    constexpr int64_t side = 16 / sizeof(Storage);
    const auto* src = static_cast<const Storage*>(direction.src) +
                      strip.lane * direction.lane_step + strip.position;
    for (int64_t i = 0; i < strip.positions; i += side) {
        const int64_t count = strip.positions - i < side ? strip.positions - i : side;
        const bool whole = count == side && strip.lanes == kStripLanes;
        if (i % (kLine / static_cast<int64_t>(sizeof(Storage))) == 0)
            for (int64_t lane = 0; lane < strip.lanes; ++lane)
                __builtin_prefetch(src + lane * direction.lane_step + i + strip.ahead, 0, 2);
        Storage some[kStripLanes][side];
        if (!whole) {
            memset(some, 0, sizeof(some));
            for (int64_t lane = 0; lane < strip.lanes; ++lane)
                memcpy(some[lane], src + lane * direction.lane_step + i,
                       static_cast<size_t>(count) * sizeof(Storage));
        }
        Storage turned[side][kStripLanes];
        for (int64_t lane = 0; lane < kStripLanes; lane += side) {
            Vector square[side];
#pragma GCC unroll 16
            for (int64_t k = 0; k < side; ++k)
                square[k] = load<Vector>(whole ? src + (lane + k) * direction.lane_step + i
                                               : some[lane + k]);
            transpose_square(square);
#pragma GCC unroll 16
            for (int64_t k = 0; k < side; ++k) store(&turned[k][lane], square[k]);
        }
        for (int64_t k = 0; k < count; ++k) widen_position<Element>(turned[k], work.values[i + k]);
    }
}

template <class Element>
OTTAVA_INLINE void read_typed(const LevelsDirection& direction, const LevelsStrip& strip,
                              Strip& work) {
    direction.columnwise ? read_columns<Element>(direction, strip, work)
                         : read_rows<Element>(direction, strip, work);
}

// -- rotation --

// What is done with the sums of a rotation: nothing, or a product that is rounded to a dtype.
struct Sums {
    OTTAVA_INLINE f32v operator()(f32v sum) const { return sum; }
};

template <Dtype dtype>
struct RoundedSums {
    float factor;
    OTTAVA_INLINE f32v operator()(f32v sum) const {
        const f32v x = sum * factor;
        if constexpr (dtype == Dtype::bfloat16) {
            // NaN of bfloat16 elements, and of their sums, stay NaN when their bits are raised.
            const u32v bits = bits_as<u32v>(x);
            return bits_as<f32v>((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u);
        }
        return dtype == Dtype::float16 ? rounded_half(x) : x;
    }
};

// Rotates groups of positions. Strides up to 8 are done in registers.
template <class Finish>
void rotate(const LevelsLayout& layout, int64_t positions, const Finish& finish, Strip& work) {
    const int size = layout.rotation;
    uint32_t signs[kStripPositions];
    for (int p = 0; p < size; ++p)
        signs[p] = static_cast<uint32_t>(layout.signs[p / 64] >> (p % 64) & 1) << 31;
    for (int64_t i = 0; i < positions; i += 16)
        for (int k = 0; k < kStripLanes; k += kLanes) {
            f32v x[16];
#pragma GCC unroll 16
            for (int p = 0; p < 16; ++p)
                x[p] =
                    bits_as<f32v>(load<u32v>(work.values[i + p] + k) ^ signs[(i & (size - 1)) + p]);
            butterfly<1>(x);
#pragma GCC unroll 16
            for (int p = 0; p < 16; ++p)
                store(work.values[i + p] + k, size == 16 ? finish(x[p]) : x[p]);
        }
    for (int stride = 16; stride < size; stride *= 2) {
        const bool last = 2 * stride == size;
        for (int64_t i = 0; i < positions; ++i) {
            if (i & stride) continue;
            for (int k = 0; k < kStripLanes; k += kLanes) {
                const f32v a = load<f32v>(work.values[i] + k);
                const f32v b = load<f32v>(work.values[i + stride] + k);
                const f32v sum = a + b, difference = a - b;
                store(work.values[i] + k, last ? finish(sum) : sum);
                store(work.values[i + stride] + k, last ? finish(difference) : difference);
            }
        }
    }
}

// Calls run(finish) with what a rotation does with sums of elements of the dtype.
template <class Run>
OTTAVA_INLINE void with_rounded_sums(const LevelsLayout& layout, Dtype dtype, const Run& run) {
    const float factor = rotation_factor(layout.rotation);
    switch (dtype) {
        case Dtype::float32:
            return run(RoundedSums<Dtype::float32>{factor});
        case Dtype::bfloat16:
            return run(RoundedSums<Dtype::bfloat16>{factor});
        default:
            return run(RoundedSums<Dtype::float16>{factor});
    }
}

// Reads a strip, padded with zeros to whole blocks and groups. Returns the positions that have
// results, which include the padding of a rotation.
int64_t read_strip(const LevelsLayout& layout, const LevelsDirection& direction,
                   const LevelsStrip& strip, Strip& work) {
    switch (direction.dtype) {
        case Dtype::float32:
            read_typed<Float32>(direction, strip, work);
            break;
        case Dtype::bfloat16:
            read_typed<BFloat16>(direction, strip, work);
            break;
        default:
            read_typed<Float16>(direction, strip, work);
    }
    const int64_t stored =
        direction.rotated ? multiple_of(strip.positions, layout.rotation) : strip.positions;
    const int64_t padded = multiple_of(stored, layout.block.positions);
    if (padded > strip.positions)
        memset(work.values[strip.positions], 0,
               static_cast<size_t>(padded - strip.positions) * sizeof(Values));
    return stored;
}

// The largest magnitude of each lane in a run of positions, in which NaN counts as 0.
OTTAVA_INLINE void lane_amaxes(const Values* values, int64_t count, float* out) {
    for (int k = 0; k < kStripLanes; k += kLanes) {
        f32v best[2] = {};
        int64_t i = 0;
        for (; i + 2 <= count; i += 2)
            for (int64_t n = 0; n < 2; ++n) {
                const f32v x = bits_as<f32v>(load<i32v>(values[i + n] + k) & kMagnitude);
                best[n] = larger(x, best[n]);
            }
        for (; i < count; ++i)
            best[0] = larger(bits_as<f32v>(load<i32v>(values[i] + k) & kMagnitude), best[0]);
        store(out + k, larger(best[0], best[1]));
    }
}

void levels_amax_run(const LevelsLayout& layout, const LevelsDirection& direction,
                     const LevelsStrip& strip, float* out) {
    Strip work;
    const int64_t stored = read_strip(layout, direction, strip, work);
    if (!direction.rotated) return lane_amaxes(work.values, stored, out);
    // The product and the rounding keep the order, so that only the largest sum needs them.
    rotate(layout, stored, Sums(), work);
    alignas(64) Values sums;
    lane_amaxes(work.values, stored, sums);
    with_rounded_sums(layout, direction.dtype, [&](const auto& finish) {
        for (int k = 0; k < kStripLanes; k += kLanes) store(out + k, finish(load<f32v>(sums + k)));
    });
}

// -- random words --

struct MultiplyLow {
    static OTTAVA_INLINE u64v of(u64v a, u64v b) {
#if defined(__AVX512BW__)
        return bits_as<u64v>(_mm512_mul_epu32(bits_as<__m512i>(a), bits_as<__m512i>(b)));
#elif defined(__AVX2__)
        return bits_as<u64v>(_mm256_mul_epu32(bits_as<__m256i>(a), bits_as<__m256i>(b)));
#elif defined(OTTAVA_X86)
        return bits_as<u64v>(_mm_mul_epu32(bits_as<__m128i>(a), bits_as<__m128i>(b)));
#elif defined(OTTAVA_NEON)
        return bits_as<u64v>(
            vmull_u32(vmovn_u64(bits_as<uint64x2_t>(a)), vmovn_u64(bits_as<uint64x2_t>(b))));
#else
        return (a & 0xffffffffu) * (b & 0xffffffffu);
#endif
    }
};

constexpr int kLongs = kLanes / 2;  // lanes of 64 bits

// The random words of two vectors of blocks.
OTTAVA_INLINE void random_vectors(const PhiloxKeys& keys, uint32_t stream, const u64v (&blocks)[2],
                                  u64v (&words)[4][2]) {
    for (int i = 0; i < 2; ++i) {
        words[0][i] = blocks[i];
        words[1][i] = blocks[i] >> 32;
        words[2][i] = u64v{} + uint64_t{stream};
        words[3][i] = u64v{};
    }
    philox<MultiplyLow, 2>(words, keys);
}

OTTAVA_INLINE u64v low_halves(u64v low, u64v high) {
    return (low & 0xffffffffu) | (high << 32);
}

// Words of rows: each lane has blocks of its own, and their four words are four positions.
void random_rows(uint64_t seed, uint64_t first, uint64_t lane_blocks, int64_t positions,
                 Words* out) {
    const PhiloxKeys keys = philox_keys(seed);
    uint64_t even[kLongs];
    for (int i = 0; i < kLongs; ++i) even[i] = 2 * static_cast<uint64_t>(i) * lane_blocks;
    const u64v lanes = load<u64v>(even);
    for (int64_t position = 0; position < positions; position += 4)
        for (int k = 0; k < kStripLanes; k += kLanes) {
            const u64v block = lanes + (first + static_cast<uint64_t>(position / 4) +
                                        static_cast<uint64_t>(k) * lane_blocks);
            const u64v blocks[2] = {block, block + lane_blocks};
            u64v words[4][2];
            random_vectors(keys, 0, blocks, words);
            for (int p = 0; p < 4; ++p)
                store(out[position + p] + k, low_halves(words[p][0], words[p][1]));
        }
}

// The 64-bit lanes of a and b alternating.
template <bool High>
OTTAVA_INLINE u64v alternate(u64v a, u64v b) {
#if OTTAVA_VECTOR_BYTES == 64
    return High ? __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
                : __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
#elif OTTAVA_VECTOR_BYTES == 32
    return High ? __builtin_shufflevector(a, b, 2, 6, 3, 7)
                : __builtin_shufflevector(a, b, 0, 4, 1, 5);
#else
    return High ? __builtin_shufflevector(a, b, 1, 3) : __builtin_shufflevector(a, b, 0, 2);
#endif
}

// Words of columns: the four words of a block are those of four neighbouring lanes.
void random_columns(uint64_t seed, uint32_t stream, uint64_t first, uint64_t position_blocks,
                    int64_t positions, Words* out) {
    const PhiloxKeys keys = philox_keys(seed);
    constexpr int per_position = kStripLanes / 4;
    for (int64_t position = 0; position < positions; position += 4) {
        uint64_t blocks[4 * per_position];
        for (int i = 0; i < 4 * per_position; ++i)
            blocks[i] = first +
                        static_cast<uint64_t>(position + i / per_position) * position_blocks +
                        static_cast<uint64_t>(i % per_position);
        auto* to = reinterpret_cast<uint8_t*>(out[position]);
        for (int i = 0; i < 4 * per_position; i += 2 * kLongs) {
            const u64v pair[2] = {load<u64v>(blocks + i), load<u64v>(blocks + i + kLongs)};
            u64v words[4][2];
            random_vectors(keys, stream, pair, words);
            for (int n = 0; n < 2; ++n, to += 4 * kLongs * sizeof(uint32_t)) {
                const u64v a = low_halves(words[0][n], words[1][n]);
                const u64v b = low_halves(words[2][n], words[3][n]);
                store(to, alternate<false>(a, b));
                store(to + sizeof(u64v), alternate<true>(a, b));
            }
        }
    }
}

// Random words of `count` places in a row.
void random_run(uint64_t seed, uint32_t stream, uint64_t place, int64_t count, uint32_t* out,
                int64_t step) {
    uint32_t words[4];
    for (int64_t i = 0; i < count; ++i, ++place) {
        if (i == 0 || place % 4 == 0) random_block(seed, place / 4, stream, words);
        out[i * step] = words[place % 4];
    }
}

void random_words(const LevelsDirection& direction, const LevelsStrip& strip, uint64_t seed,
                  int64_t positions, Words* out) {
    const auto lane_step = static_cast<uint64_t>(direction.place_lane_step);
    const auto position_step = static_cast<uint64_t>(direction.place_position_step);
    const uint64_t place = direction.first_place + static_cast<uint64_t>(strip.lane) * lane_step +
                           static_cast<uint64_t>(strip.position) * position_step;
    const uint64_t step = direction.columnwise ? position_step : lane_step;
    if (step % 4 == 0 && place % 4 == 0) {
        if (direction.columnwise)
            random_columns(seed, direction.stream, place / 4, step / 4, positions, out);
        else
            random_rows(seed, place / 4, step / 4, positions, out);
    } else if (direction.columnwise) {
        for (int64_t i = 0; i < positions; ++i)
            random_run(seed, direction.stream, place + static_cast<uint64_t>(i) * step, strip.lanes,
                       out[i], 1);
    } else {
        for (int64_t lane = 0; lane < strip.lanes; ++lane)
            random_run(seed, 0, place + static_cast<uint64_t>(lane) * step, positions,
                       out[0] + lane, kStripLanes);
    }
}

// -- scales --

// The second level of each lane.
struct Second {
    bool exists;
    alignas(64) Values amax, scale, inverse;

    Second(const LevelsLayout& layout, const LevelsDirection& direction, const LevelsStrip& strip)
        : exists(direction.second != nullptr) {
        for (int lane = 0; lane < kStripLanes; ++lane) {
            amax[lane] = 0.0f, scale[lane] = 1.0f, inverse[lane] = 1.0f;
            if (!exists || lane >= strip.lanes) continue;
            amax[lane] =
                direction.second[layout.second == SecondLevel::row ? strip.lane + lane : 0];
        }
        for (int k = 0; exists && k < kStripLanes; k += kLanes) {
            const f32v multiplier = second_scale(load<f32v>(amax + k), layout.top);
            store(scale + k, multiplier);
            store(inverse + k, divide(broadcast(1.0f), multiplier));
        }
    }
    OTTAVA_INLINE SecondScale<f32v> of(int k) const {
        return {load<f32v>(amax + k), load<f32v>(scale + k), load<f32v>(inverse + k)};
    }
};

// The scales of the blocks of all lanes: the bytes or bits that are stored, what multiplies their
// elements, and what multiplies them when they are decoded.
struct Scales {
    alignas(64) Words stored;
    alignas(64) Values multipliers, values;

    OTTAVA_INLINE void put(int k, const BlockScale<f32v, i32v>& scale) {
        store(stored + k, scale.stored);
        store(multipliers + k, scale.multiplier);
        store(values + k, scale.value);
    }
    OTTAVA_INLINE BlockScale<f32v, i32v> of(int k) const {
        return {load<i32v>(stored + k), load<f32v>(multipliers + k), load<f32v>(values + k)};
    }
};

// The scales for these amaxes, and for the factors of candidates if there are any.
template <class Format>
void scales_of_blocks(const LevelsLayout& layout, const LevelsDirection& direction,
                      const float* amaxes, const float* factors, const Second& second,
                      Scales& out) {
    for (int k = 0; k < kStripLanes; k += kLanes) {
        f32v factor;
        if (factors != nullptr) factor = load<f32v>(factors + k);
        out.put(k, block_scale<Format, f32v, i32v>(
                       layout, direction.largest, load<f32v>(amaxes + k),
                       factors == nullptr ? nullptr : &factor, second.of(k)));
    }
}

// -- candidates --

// The errors of the lanes in `count` positions, which have the same scales, summed by position.
template <class Format>
void lane_errors(const LevelsLayout& layout, const Values* values, int64_t count,
                 const Scales& scales, const Second& second, float* out) {
    for (int k = 0; k < kStripLanes; k += kLanes) {
        const BlockScale<f32v, i32v> scale = scales.of(k);
        const f32v amax = load<f32v>(second.amax + k);
        f32v sum = {};
        for (int64_t i = 0; i < count; ++i)
            sum += candidate_error<Format>(layout, load<f32v>(values[i] + k), scale, amax);
        store(out + k, sum);
    }
}

// The sums of the lanes of each block, by halves, in all of its lanes.
void sum_lanes(int64_t lanes, float* errors) {
    for (int64_t first = 0; lanes > 1 && first < kStripLanes; first += lanes) {
        float* of = errors + first;
        for (int64_t half = lanes / 2; half > 0; half /= 2)
            for (int64_t i = 0; i < half; ++i) of[i] += of[i + half];
        for (int64_t i = 1; i < lanes; ++i) of[i] = of[0];
    }
}

// The scales of a candidate, and the errors of lanes in `count` positions.
template <class Format>
OTTAVA_INLINE void try_candidate(const LevelsLayout& layout, const LevelsDirection& direction,
                                 int number, const Values* values, int64_t count,
                                 const float* amaxes, const Second& second, Scales& scales,
                                 float* errors) {
    alignas(64) Values factors;
    for (float& factor : factors) factor = layout.candidates[number];
    scales_of_blocks<Format>(layout, direction, amaxes, factors, second, scales);
    lane_errors<Format>(layout, values, count, scales, second, errors);
}

// The scales of the candidates with the least errors, the first of equal ones.
template <class Format>
void chosen_scales(const LevelsLayout& layout, const LevelsDirection& direction,
                   const Values* values, const float* amaxes, const Second& second, Scales& out) {
    alignas(64) Values least = {};
    for (int n = 0; n < layout.candidate_count; ++n) {
        Scales scales;
        alignas(64) Values errors;
        try_candidate<Format>(layout, direction, n, values, layout.block.positions, amaxes, second,
                              scales, errors);
        sum_lanes(layout.block.lanes, errors);
        for (int lane = 0; lane < kStripLanes; ++lane) {
            if (n > 0 && !(errors[lane] < least[lane])) continue;
            least[lane] = errors[lane];
            out.stored[lane] = scales.stored[lane];
            out.multipliers[lane] = scales.multipliers[lane];
        }
    }
}

// -- elements --

// The codes of a block, in words of 32 bits for each lane.
template <class Format, bool AtRandom>
void encode_block(const Values* values, const Words* random, int64_t positions,
                  const float* multipliers, Words* codes) {
    constexpr int bits = Format::width == 4 ? 4 : 8, per_word = 32 / bits;
    for (int k = 0; k < kStripLanes; k += kLanes) {
        const f32v multiplier = load<f32v>(multipliers + k);
        for (int64_t w = 0; w < positions / per_word; ++w) {
            i32v word = {};
#pragma GCC unroll 16
            for (int n = 0; n < per_word; ++n) {
                const int64_t i = w * per_word + n;
                const f32v x = load<f32v>(values[i] + k) * multiplier;
                i32v code;
                if constexpr (AtRandom)
                    code = encode_at_random<Format, f32v, i32v, u32v>(x, load<u32v>(random[i] + k));
                else
                    code = encode_element<Format, f32v, i32v>(x);
                word |= code << (bits * n);
            }
            store(codes[w] + k, word);
        }
    }
}

// -- writing --

void write_data(const LevelsLayout& layout, const LevelsDirection& direction,
                const LevelsStrip& strip, int64_t stored, const Strip& work) {
    const int64_t per_byte = elements_per_byte(layout.element);
    if (direction.by_position) {
        for (int64_t i = 0; i < stored; ++i) {
            i32v data[kVectors];
            for (int k = 0; k < kVectors; ++k)
                data[k] = bits_as<i32v>(load<u32v>(work.codes[i / 4] + k * kLanes) >>
                                            (8 * static_cast<int>(i % 4)) &
                                        0xff);
            const u8x16 lanes = narrow8(data);
            memcpy(direction.data + (strip.position + i) * direction.data_step + strip.lane, &lanes,
                   static_cast<size_t>(strip.lanes));
        }
        return;
    }
    const int64_t bytes = (stored + per_byte - 1) / per_byte;
    for (int64_t lane = 0; lane < strip.lanes; ++lane) {
        uint32_t words[kWords];
        for (int64_t w = 0; w < (bytes + 3) / 4; ++w) words[w] = work.codes[w][lane];
        uint8_t* to =
            direction.data + (strip.lane + lane) * direction.data_step + strip.position / per_byte;
        memcpy(to, words, static_cast<size_t>(bytes));
        // An odd last element has a byte of its own.
        if (stored % per_byte != 0) to[bytes - 1] &= 0xf;
    }
}

template <class Stored>
void write_scales(const LevelsLayout& layout, const LevelsDirection& direction,
                  const LevelsStrip& strip, int64_t blocks, const Strip& work) {
    auto* scales = static_cast<Stored*>(direction.scales) +
                   strip.position / layout.block.positions * direction.scale_position_step;
    const int64_t lanes = layout.block.lanes;
    // The lanes of a block have the same scale.
    for (int64_t lane = (lanes - strip.lane % lanes) % lanes; lane < strip.lanes; lane += lanes) {
        Stored* to = scales + (strip.lane + lane) / lanes * direction.scale_lane_step;
        for (int64_t block = 0; block < blocks; ++block)
            to[block * direction.scale_position_step] =
                static_cast<Stored>(work.scales[block][lane]);
    }
}

// -- a strip --

// The numbers of the lanes' areas: their amaxes, or the factors of their candidates.
void of_areas(const float* numbers, const LevelsLayout& layout, const LevelsDirection& direction,
              const LevelsStrip& strip, int64_t position, float* out) {
    numbers += (strip.position + position) / layout.area.positions * direction.area_position_step;
    for (int64_t lane = 0; lane < kStripLanes; ++lane) {
        out[lane] = 0.0f;
        if (lane < strip.lanes)
            out[lane] = numbers[(strip.lane + lane) / layout.area.lanes * direction.area_lane_step];
    }
}

template <class Format>
void find_scales(const LevelsLayout& layout, const LevelsDirection& direction,
                 const LevelsStrip& strip, int64_t position, const Second& second,
                 const Values* values, Scales& out) {
    alignas(64) Values amaxes, factors;
    if (direction.amaxes == nullptr)
        lane_amaxes(values, layout.block.positions, amaxes);
    else
        of_areas(direction.amaxes, layout, direction, strip, position, amaxes);
    if (direction.factors != nullptr) {
        of_areas(direction.factors, layout, direction, strip, position, factors);
        scales_of_blocks<Format>(layout, direction, amaxes, factors, second, out);
    } else if (layout.candidate_count > 0) {
        chosen_scales<Format>(layout, direction, values, amaxes, second, out);
    } else {
        scales_of_blocks<Format>(layout, direction, amaxes, nullptr, second, out);
    }
}

template <class Format>
void quantize_block(const LevelsLayout& layout, const LevelsDirection& direction,
                    const LevelsStrip& strip, int64_t position, const Second& second, Strip& work) {
    const int64_t count = layout.block.positions;
    const Values* values = work.values + position;
    Scales scales;
    find_scales<Format>(layout, direction, strip, position, second, values, scales);
    memcpy(work.scales[position / count], scales.stored, sizeof(Words));
    Words* codes = work.codes + position / (Format::width == 4 ? 8 : 4);
    if (layout.stochastic)
        encode_block<Format, true>(values, work.random + position, count, scales.multipliers,
                                   codes);
    else
        encode_block<Format, false>(values, nullptr, count, scales.multipliers, codes);
}

void levels_errors_run(const LevelsLayout& layout, const LevelsDirection& direction,
                       const LevelsStrip& strip, float* out) {
    Strip work;
    const int64_t side = layout.area.positions;
    const int64_t padded =
        multiple_of(read_strip(layout, direction, strip, work), layout.block.positions);
    const Second second(layout, direction, strip);
    with_level_element(layout.element, [&](auto format) {
        for (int64_t position = 0; position < padded; position += side) {
            // The padding of an area beyond that of its blocks would add zeros.
            const int64_t count = padded - position < side ? padded - position : side;
            alignas(64) Values amaxes;
            of_areas(direction.amaxes, layout, direction, strip, position, amaxes);
            for (int n = 0; n < layout.candidate_count; ++n) {
                Scales scales;
                try_candidate<decltype(format)>(
                    layout, direction, n, work.values + position, count, amaxes, second, scales,
                    out + (n * kStripPositions + position) / side * kStripPositions);
            }
        }
    });
}

void levels_quantize_run(const LevelsLayout& layout, const LevelsDirection& direction,
                         const LevelsStrip& strip, uint64_t seed) {
    Strip work;
    const int64_t stored = read_strip(layout, direction, strip, work);
    const int64_t blocks = (stored + layout.block.positions - 1) / layout.block.positions;
    if (direction.rotated)
        with_rounded_sums(layout, direction.dtype,
                          [&](const auto& finish) { rotate(layout, stored, finish, work); });
    if (layout.stochastic) random_words(direction, strip, seed, stored, work.random);
    const Second second(layout, direction, strip);
    with_level_element(layout.element, [&](auto format) {
        for (int64_t block = 0; block < blocks; ++block)
            quantize_block<decltype(format)>(layout, direction, strip,
                                             block * layout.block.positions, second, work);
    });
    write_data(layout, direction, strip, stored, work);
    if (layout.scale == LevelScale::float32)
        write_scales<uint32_t>(layout, direction, strip, blocks, work);
    else
        write_scales<uint8_t>(layout, direction, strip, blocks, work);
}

// -- decoding --

template <class Out>
OTTAVA_INLINE void put_values(f32v values, Out* out, Dtype dtype) {
    if constexpr (sizeof(Out) == 4) {
        // Which NaN a product is differs between machines.
        const i32v bits = bits_as<i32v>(values);
        store(out, (bits & kMagnitude) > kInfinity ? i32v{} + kQuietNan : bits);
    } else {
        const i32v narrow = dtype == Dtype::bfloat16 ? encode_bfloat16<f32v, i32v>(values)
                                                     : encode<Half, f32v, i32v>(values);
        store_narrow16(out, bits_as<u32v>(narrow));
    }
}

template <class Out>
void decode_typed(const LevelsRun& run, Out* out, Dtype dtype) {
    constexpr int64_t step = kStripLanes;
    for (int64_t i = 0; i < run.count; i += step) {
        const int64_t count = run.count - i < step ? run.count - i : step;
        alignas(64) float values[step] = {};
        const uint8_t* data = run.data + i / run.per_byte;
        if (run.per_byte == 2)
            for (int64_t k = 0; k < count / 2; ++k)
                memcpy(values + 2 * k, run.values + 2 * data[k], 2 * sizeof(float));
        else
            for (int64_t k = 0; k < count; ++k) values[k] = run.values[data[k]];
        alignas(64) Out results[step];
        alignas(64) float some[2][step] = {};
        const float* scales = run.scales == nullptr ? nullptr : run.scales + i;
        const float* second = run.second == nullptr ? nullptr : run.second + i;
        if (count < step) {
            const auto bytes = static_cast<size_t>(count) * sizeof(float);
            if (run.scales != nullptr) memcpy(some[0], scales, bytes);
            if (run.second != nullptr) memcpy(some[1], second, bytes);
            scales = some[0], second = some[1];
        }
        Out* to = count < step ? results : out + i;
        for (int k = 0; k < step; k += kLanes) {
            f32v x = load<f32v>(values + k);
            if (run.scales != nullptr) x *= load<f32v>(scales + k);
            x *= run.second == nullptr ? broadcast(run.factor) : load<f32v>(second + k);
            put_values(x, to + k, dtype);
        }
        if (count < step) memcpy(out + i, results, static_cast<size_t>(count) * sizeof(Out));
    }
}

void levels_decode_run(const LevelsRun& run, void* out, Dtype dtype) {
    if (dtype == Dtype::float32)
        decode_typed(run, static_cast<uint32_t*>(out), dtype);
    else
        decode_typed(run, static_cast<uint16_t*>(out), dtype);
}
