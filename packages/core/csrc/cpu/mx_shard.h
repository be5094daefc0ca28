// Kernels over panels of which only a part is at hand: the amaxes of MX blocks, and the cast with scales that are known.
// Include once, after mx_decode.h and rounded.h.

// Calls body(row, first, src, count, offset) for each row of the panel of which something is at hand: `count` elements
// from its column `first` on, that begin at `src` and are `offset` elements from the shard's beginning.
template <class Storage, class Body>
OTTAVA_INLINE void over_rows(const MxShard& shard, const Body& body) {
    const Storage* begin = static_cast<const Storage*>(shard.src);
    for (int64_t r = 0; r < shard.rows; ++r) {
        const int64_t left = (shard.row + r) * shard.stride + shard.col - shard.start;
        const int64_t from = left > 0 ? left : 0;
        const int64_t to = left + shard.cols < shard.count ? left + shard.cols : shard.count;
        if (from < to) body(r, from - left, begin + from, to - from, from);
    }
}

// Calls body(line, inside, at, count) for each line of a row that begins at column `first`: `count` elements, the first
// of which is number `inside` of the line at column `line` of the panel, and number `at` of the row.
template <class Body>
OTTAVA_INLINE void over_lines(int64_t first, int64_t count, const Body& body) {
    for (int64_t at = 0; at < count;) {
        const int64_t inside = (first + at) % kLine, room = kLine - inside;
        const int64_t some = room < count - at ? room : count - at;
        body(first + at - inside, inside, at, some);
        at += some;
    }
}

// A line of which only some elements are at hand, the others zero.
template <class Storage>
struct PartialLine {
    alignas(64) Storage elements[kLine] = {};
    PartialLine(const Storage* from, int64_t inside, int64_t count) {
        memcpy(elements + inside, from, static_cast<size_t>(count) * sizeof(Storage));
    }
};

template <class Element>
class ShardAmax {
    typedef typename Element::storage Storage;
    static constexpr int64_t kBlocks = kPanelCols / kMxBlock;
    alignas(64) Storage columns_[kPanelCols] = {};
    alignas(64) Storage blocks_[kBlocks] = {};
    const MxShard& shard_;
    const MxShardAmax& to_;
    const Dtype nominal_;
    const int64_t count_;  // blocks of a row

    // Rounding keeps the order of magnitudes, so that the largest may be rounded last.
    void put(const Storage* amaxes, int64_t count, float* out) const {
        alignas(64) float values[kPanelCols];
        with_rounding(nominal_, [&](auto round) {
            for (int64_t i = 0; i < count; i += kLanes) store(values + i, round(Element::load_floats(amaxes + i)));
        });
        memcpy(out, values, static_cast<size_t>(count) * sizeof(float));
    }

    void observe_row(const Storage* src, int64_t first, int64_t count, Storage* columns) {
        over_lines(first, count, [&](int64_t line, int64_t inside, int64_t at, int64_t some) {
            Storage* below = columns == nullptr ? nullptr : columns + line;
            if (some == kLine) return observe<Element>(src + at, below, blocks_ + line / kMxBlock);
            const PartialLine<Storage> rest(src + at, inside, some);
            observe<Element>(rest.elements, below, blocks_ + line / kMxBlock);
        });
    }

   public:
    ShardAmax(const MxShard& shard, Dtype nominal, const MxShardAmax& to)
        : shard_(shard), to_(to), nominal_(nominal), count_((shard.cols + kMxBlock - 1) / kMxBlock) {}

    void run() {
        const bool square = to_.columns == nullptr;
        Storage* columns = square ? nullptr : columns_;
        bool any = false;
        over_rows<Storage>(shard_, [&](int64_t r, int64_t first, const Storage* src, int64_t count, int64_t) {
            any = true;
            observe_row(src, first, count, columns);
            if (square) return;
            put(blocks_, count_, to_.row_blocks + r * to_.row_block_stride);
            memset(blocks_, 0, sizeof(blocks_));
        });
        if (!any) return;
        if (square)
            put(blocks_, count_, to_.row_blocks);
        else
            put(columns_, shard_.cols, to_.columns);
    }
};

void mx_shard_amax_run(const MxShard& shard, Dtype dtype, Dtype nominal, const MxShardAmax& to) {
    switch (dtype) {
        case Dtype::float32:
            return ShardAmax<Float32>(shard, nominal, to).run();
        case Dtype::bfloat16:
            return ShardAmax<BFloat16>(shard, nominal, to).run();
        default:
            return ShardAmax<Float16>(shard, nominal, to).run();
    }
}

// Rows are cast as float32. Those that are kept in another dtype, or count as rounded, are made so first, one at a time
// and in the first cache, for both directions.
template <class Format>
class ShardCast {
    alignas(64) float columns_[kPanelCols] = {};
    alignas(64) float blocks_[kPanelCols / kMxBlock] = {};
    alignas(64) uint32_t values_[kPanelCols];
    const MxShard& shard_;
    const MxShardCast& to_;
    const LineCast<Float32, Format> cast_{1.0f};

    static void multipliers_of(const uint8_t* scales, int64_t count, float* multipliers) {
        int64_t i = 0;
        for (; i + kLanes <= count; i += kLanes)
            store(multipliers + i, e8m0_multiplier<f32v, i32v>(load_codes(scales + i)));
        if (i == count) return;
        uint8_t rest[kLanes] = {};
        memcpy(rest, scales + i, static_cast<size_t>(count - i));
        store(multipliers + i, e8m0_multiplier<f32v, i32v>(load_codes(rest)));
    }

    template <class Lines>
    __attribute__((noinline)) void cast_row(const uint32_t* src, int64_t first, int64_t count, uint8_t* out,
                                            const Lines lines) const {
        const bool stream = to_.stream && (reinterpret_cast<uintptr_t>(out) - static_cast<uintptr_t>(first)) % kLine == 0;
        const LineCast<Float32, Format> cast = cast_;  // in registers: codes are bytes, which may be anything's
        over_lines(first, count, [&](int64_t line, int64_t inside, int64_t at, int64_t some) {
            if (some == kLine) {
                const Line codes = cast.scaled(src + at, lines.at(line));
                if (stream)
                    codes.template put_to<true>(out + at);
                else
                    codes.template put_to<false>(out + at);
                return;
            }
            const PartialLine<uint32_t> rest(src + at, inside, some);
            alignas(64) uint8_t codes[kLine];
            cast.scaled(rest.elements, lines.at(line)).template put_to<false>(codes);
            memcpy(out + at, codes + inside, static_cast<size_t>(some));
        });
    }

    template <class Source, class Round>
    const uint32_t* values_of(const typename Source::storage* src, int64_t count) {
        if constexpr (std::is_same<Source, Float32>::value && std::is_same<Round, ToFloat32>::value) return src;
        int64_t i = 0;
        for (; i + kLanes <= count; i += kLanes) store(values_ + i, Round()(Source::load_floats(src + i)));
        if (i == count) return values_;
        typename Source::storage rest[kLanes] = {};
        memcpy(rest, src + i, static_cast<size_t>(count - i) * sizeof(rest[0]));
        store(values_ + i, Round()(Source::load_floats(rest)));
        return values_;
    }

   public:
    ShardCast(const MxShard& shard, const MxShardCast& to) : shard_(shard), to_(to) {}

    template <class Source, class Round>
    void run() {
        typedef typename Source::storage Storage;
        const int64_t blocks = (shard_.cols + kMxBlock - 1) / kMxBlock;
        bool known = false;  // the columns' multipliers
        over_rows<Storage>(shard_, [&](int64_t r, int64_t first, const Storage* from, int64_t count, int64_t offset) {
            const uint32_t* src = values_of<Source, Round>(from, count);
            if (to_.row_codes != nullptr) {
                multipliers_of(to_.row_scales + r * to_.row_scale_stride, blocks, blocks_);
                cast_row(src, first, count, to_.row_codes + offset, RowLines{blocks_});
            }
            if (to_.column_codes == nullptr) return;
            if (!known) multipliers_of(to_.column_scales, shard_.cols, columns_);
            known = true;
            cast_row(src, first, count, to_.column_codes + offset, ColumnLines{columns_, columns_});
        });
        if (to_.stream) finish_streaming();
    }
};

template <class Format>
void mx_shard_cast_format(const MxShard& shard, Dtype dtype, Dtype nominal, const MxShardCast& to) {
    ShardCast<Format> cast(shard, to);
    with_rounding(nominal, [&](auto round) {
        typedef decltype(round) Round;
        if (dtype == Dtype::float32)
            cast.template run<Float32, Round>();
        else if (dtype == Dtype::bfloat16)
            cast.template run<BFloat16, Round>();
        else
            cast.template run<Float16, Round>();
    });
}

void mx_shard_cast_run(const MxShard& shard, Dtype dtype, Dtype nominal, Fp8 format, const MxShardCast& to) {
    if (format == Fp8::e4m3) return mx_shard_cast_format<E4M3>(shard, dtype, nominal, to);
    return mx_shard_cast_format<E5M2>(shard, dtype, nominal, to);
}
