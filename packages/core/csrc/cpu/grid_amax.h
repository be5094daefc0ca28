// Kernels over panels: the amaxes of blocks of any size. Include once, after mx.h.
//
// Blocks of one row that end where half-lines end are reduced along the row. For blocks of several
// rows the kernel collects the largest magnitude of each column, and reduces these along the row
// once for each row of blocks. One reading of the panel serves two grids.

constexpr int64_t kHalf = kLine / 2;
constexpr int64_t kHalves = kPanelCols / kHalf;

// Whether the blocks of a panel's rows end where half-lines end.
OTTAVA_INLINE bool ends_with_halves(const GridPanel& panel, int64_t block_cols) {
    const int64_t first = block_cols - panel.col % block_cols;
    return first >= panel.cols || (first % kHalf == 0 && block_cols % kHalf == 0);
}

// Calls body(block, first, last) for the panel's columns of each block, counted from the panel's
// first.
template <class Body>
OTTAVA_INLINE void over_blocks(const GridPanel& panel, int64_t block_cols, const Body& body) {
    int64_t block = panel.col / block_cols;
    for (int64_t first = 0; first < panel.cols; ++block) {
        const int64_t end = (block + 1) * block_cols - panel.col,
                      last = end < panel.cols ? end : panel.cols;
        body(block, first, last);
        first = last;
    }
}

// The row of blocks of a panel's row.
OTTAVA_INLINE int64_t row_of_blocks(const GridPanel& panel, const GridBlocks& blocks, int64_t r) {
    return blocks.rows == 1 ? panel.row + r : (panel.row + r) / blocks.rows;
}

// The panel's row that follows a row of blocks.
OTTAVA_INLINE int64_t end_of_blocks(const GridPanel& panel, const GridBlocks& blocks, int64_t row) {
    return (row + 1) * blocks.rows - panel.row;
}

OTTAVA_INLINE void raise(float* to, float value, bool atomic) {
    if (!atomic) {
        *to = value > *to ? value : *to;
        return;
    }
    float current;
    __atomic_load(to, &current, __ATOMIC_RELAXED);
    while (value > current && !__atomic_compare_exchange(to, &current, &value, true,
                                                         __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
}

template <class Element>
class PanelAmax {
    typedef typename Element::storage Storage;
    typedef typename Element::integers V;

    struct Grid {
        const GridBlocks* blocks;
        bool by_column;  // blocks of several rows
        bool by_halves;  // blocks end where half-lines end: `count` of them, before the whole
                         // half-lines `ends`
        int64_t first;   // block of a row
        int64_t count;
        int64_t end;  // the row that follows those of the blocks, counted from the panel's first
        uint16_t ends[kHalves];
        alignas(64) Storage columns[kPanelCols];  // if `by_column`
    };

    const GridPanel panel_;
    const bool atomic_;
    const int count_;
    const int64_t whole_;  // half-lines of a row
    Grid grids_[2];

    const Storage* row(int64_t r) const {
        return static_cast<const Storage*>(panel_.src) + r * panel_.stride;
    }

    float* values(const Grid& grid, int64_t r) const {
        return grid.blocks->values + row_of_blocks(panel_, *grid.blocks, r) * grid.blocks->stride;
    }

    static OTTAVA_INLINE V magnitudes(const Storage* from) {
        constexpr Storage magnitude = static_cast<Storage>(~Storage{0}) >> 1;
        const V infinity = V{} + Element::infinity;
        const V x = load<V>(from) & (V{} + static_cast<decltype(Element::infinity)>(magnitude));
        return x > infinity ? V{} : x;
    }

    // Raises `columns`, unless null, to the magnitudes of half a line, and returns the larger of
    // these and `best`, lane by lane.
    static OTTAVA_INLINE V observe_half(const Storage* src, Storage* columns, V best) {
        constexpr int64_t lanes = sizeof(V) / sizeof(Storage);
        for (int64_t k = 0; k < kHalf; k += lanes) {
            const V x = magnitudes(src + k);
            if (columns != nullptr) store(columns + k, larger(load<V>(columns + k), x));
            best = larger(best, x);
        }
        return best;
    }

    // Observes the whole half-lines from `half` to `end`.
    static OTTAVA_INLINE V observe_halves(const Storage* src, const Storage* next, Storage* columns,
                                          int64_t& half, int64_t end) {
        constexpr int64_t step = kLine / sizeof(Storage);
        V best = V{};
        for (; half < end; ++half) {
            const int64_t col = half * kHalf;
            for (int64_t k = 0; k < kHalf; k += step) __builtin_prefetch(next + col + k);
            best = observe_half(src + col, columns == nullptr ? nullptr : columns + col, best);
        }
        return best;
    }

    // Observes the half-line at the end of a row that is not whole.
    OTTAVA_INLINE V observe_rest(const Storage* src, Storage* columns) const {
        Storage rest[kHalf] = {};
        memcpy(rest, src + whole_ * kHalf,
               static_cast<size_t>(panel_.cols - whole_ * kHalf) * sizeof(Storage));
        return observe_half(rest, columns == nullptr ? nullptr : columns + whole_ * kHalf, V{});
    }

    OTTAVA_INLINE void observe_columns(const Storage* src, const Storage* next,
                                       Storage* columns) const {
        int64_t half = 0;
        observe_halves(src, next, columns, half, whole_);
        if (whole_ * kHalf < panel_.cols) observe_rest(src, columns);
    }

    // Raises `columns`, unless null, and the amaxes of a grid's blocks, which end where half-lines
    // end.
    OTTAVA_INLINE void observe_blocks(const Storage* src, const Storage* next, int64_t r,
                                      Storage* columns, const Grid& grid) const {
        alignas(64) Storage amaxes[kHalves] = {};
        const int64_t count = grid.count, whole = whole_;
        int64_t half = 0;
        if (grid.blocks->cols == kHalf)
            while (half < whole) {
                const int64_t block = half;
                amaxes[block] = largest_lane(observe_halves(src, next, columns, half, block + 1));
            }
        else
            for (int64_t block = 0; block < count; ++block)
                amaxes[block] =
                    largest_lane(observe_halves(src, next, columns, half, grid.ends[block]));
        if (whole * kHalf < panel_.cols) {
            const Storage last = largest_lane(observe_rest(src, columns));
            amaxes[count - 1] = last > amaxes[count - 1] ? last : amaxes[count - 1];
        }
        raise_run(values(grid, r) + grid.first, amaxes, count);
    }

    // Raises the amaxes of `count` blocks in a row. Few blocks are raised one by one, because a
    // vector load would wait for their stores.
    OTTAVA_INLINE void raise_run(float* to, const Storage* from, int64_t count) const {
        int64_t k = 0;
        for (; !atomic_ && k + kLanes <= count; k += kLanes)
            store(to + k, larger(load<f32v>(to + k), Element::load_floats(from + k)));
        for (; k < count; ++k) raise(to + k, Element::widen(from[k]), atomic_);
    }

    // The largest magnitude of a run.
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

    // Raises the amaxes of a row of blocks to the magnitudes of a row of elements, or of columns.
    void raise_blocks(const Grid& grid, int64_t r, const Storage* from) const {
        float* to = values(grid, r);
        if (grid.by_column && grid.blocks->cols == 1)
            return raise_run(to + panel_.col, from, panel_.cols);
        if (grid.by_halves) return observe_blocks(from, from, r, nullptr, grid);
        over_blocks(panel_, grid.blocks->cols, [&](int64_t block, int64_t first, int64_t last) {
            raise(to + block, Element::widen(largest_of(from + first, last - first)), atomic_);
        });
    }

    static bool by_row(const Grid& grid) { return grid.by_halves && !grid.by_column; }

    // Raises the amaxes of a row of blocks after its last row, or the last row of the panel.
    void finish_blocks(Grid& grid, int64_t r) const {
        if (!grid.by_column || (r + 1 < panel_.rows && r + 1 < grid.end)) return;
        raise_blocks(grid, r, grid.columns);
        forget_columns(grid);
        grid.end += grid.blocks->rows;
    }

    void forget_columns(Grid& grid) const {
        memset(grid.columns, 0,
               static_cast<size_t>((panel_.cols + kHalf - 1) / kHalf * kHalf) * sizeof(Storage));
    }

public:
    PanelAmax(const GridPanel& panel, const GridBlocks* grids, int count, bool atomic)
        : panel_(panel), atomic_(atomic), count_(count), whole_(panel.cols / kHalf) {
        for (int k = 0; k < count; ++k) {
            Grid& grid = grids_[k];
            grid.blocks = grids + k;
            grid.by_column = grids[k].rows > 1;
            grid.by_halves = ends_with_halves(panel, grids[k].cols);
            grid.first = panel.col / grids[k].cols;
            grid.count = 0;
            if (grid.by_column) {
                forget_columns(grid);
                grid.end = end_of_blocks(panel, grids[k], row_of_blocks(panel, grids[k], 0));
            }
            if (!grid.by_halves) continue;
            over_blocks(panel, grids[k].cols, [&](int64_t, int64_t, int64_t last) {
                grid.ends[grid.count++] = static_cast<uint16_t>(last / kHalf);
            });
        }
    }

    void observe_row(int64_t r) {
        Grid &a = grids_[0], &b = grids_[1];
        const Storage *src = row(r), *next = r + 1 < panel_.rows ? row(r + 1) : src;
        if (count_ == 2 && by_row(a) && b.by_column)
            observe_blocks(src, next, r, b.columns, a);
        else if (count_ == 2 && a.by_column && by_row(b))
            observe_blocks(src, next, r, a.columns, b);
        else
            for (int k = 0; k < count_; ++k)
                if (grids_[k].by_column)
                    observe_columns(src, next, grids_[k].columns);
                else if (grids_[k].by_halves)
                    observe_blocks(src, next, r, nullptr, grids_[k]);
                else
                    raise_blocks(grids_[k], r, src);
        for (int k = 0; k < count_; ++k) finish_blocks(grids_[k], r);
    }

    void run() {
        for (int64_t r = 0; r < panel_.rows; ++r) observe_row(r);
    }
};

void grid_amax_run(const GridPanel& panel, Dtype dtype, const GridBlocks* grids, int count,
                   bool atomic) {
    switch (dtype) {
        case Dtype::float32:
            return PanelAmax<Float32>(panel, grids, count, atomic).run();
        case Dtype::bfloat16:
            return PanelAmax<BFloat16>(panel, grids, count, atomic).run();
        default:
            return PanelAmax<Float16>(panel, grids, count, atomic).run();
    }
}
