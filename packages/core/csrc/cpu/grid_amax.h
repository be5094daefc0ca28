// Kernels over panels: the amaxes of blocks of any size. Include once, after mx.h.
//
// Blocks of one row whose ends are ends of half-lines are reduced along the row. Of blocks of several rows the largest
// magnitudes of each column are kept, and reduced along the row once for each row of blocks. Two grids are observed in
// one reading of the panel.

constexpr int64_t kHalf = kLine / 2;
constexpr int64_t kHalves = kPanelCols / kHalf;

// Whether the blocks of a panel's rows end where half-lines end.
OTTAVA_INLINE bool ends_with_halves(const GridPanel& panel, int64_t block_cols) {
    const int64_t first = block_cols - panel.col % block_cols;
    return first >= panel.cols || (first % kHalf == 0 && block_cols % kHalf == 0);
}

// Calls body(block, first, last) for the panel's columns of each block, counted from the panel's first.
template <class Body>
OTTAVA_INLINE void over_blocks(const GridPanel& panel, int64_t block_cols, const Body& body) {
    int64_t block = panel.col / block_cols;
    for (int64_t first = 0; first < panel.cols; ++block) {
        const int64_t end = (block + 1) * block_cols - panel.col, last = end < panel.cols ? end : panel.cols;
        body(block, first, last);
        first = last;
    }
}

OTTAVA_INLINE void raise(float* to, float seen, bool atomic) {
    if (!atomic) {
        *to = seen > *to ? seen : *to;
        return;
    }
    float known;
    __atomic_load(to, &known, __ATOMIC_RELAXED);
    while (seen > known && !__atomic_compare_exchange(to, &known, &seen, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
}

template <class Element>
class PanelAmax {
    typedef typename Element::storage Storage;
    typedef typename Element::integers V;

    struct Grid {
        const GridBlocks* blocks;
        bool by_row, by_column;
        int64_t count;          // blocks of a row, if `by_row`
        uint16_t ends[kHalves]; // and the half-lines that they end before
        alignas(64) Storage columns[kPanelCols];  // if `by_column`
    };

    const GridPanel& panel_;
    const bool atomic_;
    const int count_;
    Grid grids_[2];

    const Storage* row(int64_t r) const { return static_cast<const Storage*>(panel_.src) + r * panel_.stride; }

    float* values(const Grid& grid, int64_t r) const {
        return grid.blocks->values + (panel_.row + r) / grid.blocks->rows * grid.blocks->stride;
    }

    static OTTAVA_INLINE V magnitudes(const Storage* from) {
        constexpr Storage magnitude = static_cast<Storage>(~Storage{0}) >> 1;
        const V infinity = V{} + Element::infinity;
        const V x = load<V>(from) & (V{} + static_cast<decltype(Element::infinity)>(magnitude));
        return x > infinity ? V{} : x;
    }

    // Half a line: raises `columns` (unless null), and returns the largest, lane by lane.
    static OTTAVA_INLINE V observe_half(const Storage* src, Storage* columns, V best) {
        constexpr int64_t lanes = sizeof(V) / sizeof(Storage);
        for (int64_t k = 0; k < kHalf; k += lanes) {
            const V x = magnitudes(src + k);
            if (columns != nullptr) store(columns + k, larger(load<V>(columns + k), x));
            best = larger(best, x);
        }
        return best;
    }

    V observe_half_at(const Storage* src, int64_t half, Storage* columns, V best) const {
        const int64_t col = half * kHalf, count = panel_.cols - col;
        Storage* below = columns == nullptr ? nullptr : columns + col;
        if (count >= kHalf) return observe_half(src + col, below, best);
        Storage rest[kHalf] = {};
        memcpy(rest, src + col, static_cast<size_t>(count) * sizeof(Storage));
        return observe_half(rest, below, best);
    }

    void prefetch(const Storage* src, int64_t half) const {
        constexpr int64_t step = kLine / sizeof(Storage);
        for (int64_t k = 0; k < kHalf; k += step) __builtin_prefetch(src + half * kHalf + k);
    }

    OTTAVA_INLINE void observe_row(int64_t r, Storage* columns, const Grid* by_row) const {
        const Storage* src = row(r);
        const Storage* next = r + 1 < panel_.rows ? row(r + 1) : src;
        const int64_t halves = (panel_.cols + kHalf - 1) / kHalf;
        if (by_row == nullptr) {
            for (int64_t half = 0; half < halves; ++half) {
                prefetch(next, half);
                observe_half_at(src, half, columns, V{});
            }
            return;
        }
        float* to = values(*by_row, r) + panel_.col / by_row->blocks->cols;
        int64_t half = 0;
        for (int64_t block = 0; block < by_row->count; ++block) {
            V best = V{};
            for (; half < by_row->ends[block]; ++half) {
                prefetch(next, half);
                best = observe_half_at(src, half, columns, best);
            }
            raise(to + block, Element::widen(largest_lane(best)), atomic_);
        }
    }

    // The largest of any run of magnitudes.
    static Storage largest_of(const Storage* from, int64_t count) {
        constexpr Storage magnitude = static_cast<Storage>(~Storage{0}) >> 1;
        constexpr auto infinity = static_cast<Storage>(Element::infinity);
        Storage best = 0;
        for (int64_t k = 0; k < count; ++k) {
            const Storage x = load<Storage>(from + k) & magnitude;
            const Storage number = x > infinity ? Storage{0} : x;
            best = number > best ? number : best;
        }
        return best;
    }

    // Blocks of one column each, from whole vectors.
    void raise_columns(float* to, const Storage* from) const {
        int64_t col = 0;
        for (; !atomic_ && col + kLanes <= panel_.cols; col += kLanes)
            store(to + col, larger(Element::load_floats(from + col), load<f32v>(to + col)));
        for (; col < panel_.cols; ++col) raise(to + col, Element::widen(from[col]), atomic_);
    }

    void raise_blocks(const Grid& grid, int64_t r, const Storage* from) const {
        float* to = values(grid, r);
        if (grid.by_column && grid.blocks->cols == 1) return raise_columns(to + panel_.col, from);
        over_blocks(panel_, grid.blocks->cols, [&](int64_t block, int64_t first, int64_t last) {
            raise(to + block, Element::widen(largest_of(from + first, last - first)), atomic_);
        });
    }

    void observe_row(int64_t r, Grid& grid) const {
        if (grid.by_row)
            observe_row(r, nullptr, &grid);
        else if (grid.by_column)
            observe_row(r, grid.columns, nullptr);
        else
            raise_blocks(grid, r, row(r));
    }

    void observe_row(int64_t r) {
        Grid &a = grids_[0], &b = grids_[1];
        if (count_ == 2 && a.by_row && b.by_column) return observe_row(r, b.columns, &a);
        if (count_ == 2 && a.by_column && b.by_row) return observe_row(r, a.columns, &b);
        for (int k = 0; k < count_; ++k) observe_row(r, grids_[k]);
    }

    // After the last row of the panel or of its blocks.
    void finish_blocks(Grid& grid, int64_t r) const {
        if (!grid.by_column || (r + 1 < panel_.rows && (panel_.row + r + 1) % grid.blocks->rows != 0)) return;
        raise_blocks(grid, r, grid.columns);
        memset(grid.columns, 0, sizeof(grid.columns));
    }

   public:
    PanelAmax(const GridPanel& panel, const GridBlocks* grids, int count, bool atomic)
        : panel_(panel), atomic_(atomic), count_(count) {
        for (int k = 0; k < count; ++k) {
            Grid& grid = grids_[k];
            grid.blocks = grids + k;
            grid.by_column = grids[k].rows > 1;
            grid.by_row = !grid.by_column && ends_with_halves(panel, grids[k].cols);
            grid.count = 0;
            if (grid.by_column) memset(grid.columns, 0, sizeof(grid.columns));
            if (!grid.by_row) continue;
            over_blocks(panel, grids[k].cols, [&](int64_t, int64_t, int64_t last) {
                grid.ends[grid.count++] = static_cast<uint16_t>((last + kHalf - 1) / kHalf);
            });
        }
    }

    void run() {
        for (int64_t r = 0; r < panel_.rows; ++r) {
            observe_row(r);
            for (int k = 0; k < count_; ++k) finish_blocks(grids_[k], r);
        }
    }
};

void grid_amax_run(const GridPanel& panel, Dtype dtype, const GridBlocks* grids, int count, bool atomic) {
    switch (dtype) {
        case Dtype::float32:
            return PanelAmax<Float32>(panel, grids, count, atomic).run();
        case Dtype::bfloat16:
            return PanelAmax<BFloat16>(panel, grids, count, atomic).run();
        default:
            return PanelAmax<Float16>(panel, grids, count, atomic).run();
    }
}
