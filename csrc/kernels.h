// The table of kernels that one instruction set offers, and the memory layouts that they share.
#pragma once

#include <cstddef>
#include <cstdint>

namespace foredraft {

// Weights are multiplied in blocks of this many elements along K, each block summed on its own, whatever the format
// and the number of rows: that is the order of summation on which exactness rests.
constexpr int kBlock = 32;
// Output columns that lie side by side in memory. A matrix is stored as panels of so many rows of the weight.
constexpr int kPanel = 32;
// KV cache: positions that lie side by side, and the positions whose softmax is merged as one step.
constexpr int kPositions = 16;
constexpr int kStep = 128;
// Positions of a page, and pages that are allocated together.
constexpr unsigned kPagePositions = 64, kPagesPerChunk = 8;
// Query rows that share one walk over keys and values.
constexpr int kQueries = 6;

enum class Format : int {
    bf16,       // bfloat16 weights and activations
    int8,       // 8-bit weights with a bfloat16 scale per block; 8-bit activations
    mxfp4,      // MXFP4 weights; 8-bit activations (W4A8)
    mxfp4_a16,  // MXFP4 weights; bfloat16 activations (W4A16)
};

constexpr bool eight_bit_activations(Format format) { return format == Format::int8 || format == Format::mxfp4; }

// Bytes of one panel's block of kBlock x kPanel weights, without scales, and of its scales.
constexpr size_t block_bytes(Format format) {
    return format == Format::bf16 ? 2 * kBlock * kPanel : format == Format::int8 ? kBlock * kPanel : kBlock * kPanel / 2;
}
constexpr size_t scale_bytes(Format format) {
    return format == Format::bf16 ? 0 : format == Format::int8 ? 2 * kPanel : kPanel;
}

// A weight [n, k] in panels. data: [panels][blocks][block_bytes]; scales: [panels][blocks][kPanel].
//   bf16:      a block is [pair of k][column][2]
//   int8:      [quad of k][column][4], each byte the signed weight plus 128
//   mxfp4:     [half panel of 16 columns][4 groups][column][4]: low nibbles are the group's first four k, high
//              nibbles its last four
//   mxfp4_a16: [half panel][4 groups][column][2] words, nibble j of which belongs to the group's pair j
// Columns and elements beyond n and k hold zeros.
struct MatrixView {
    Format format;
    int n, k;
    int panels, blocks;
    const uint8_t* data;
    const uint8_t* scales;
    // Part of more weights than the last cache holds: each pass reads them from memory anyway.
    bool streamed = false;
};

// Rows [rows, blocks * kBlock] in the form a format multiplies: bfloat16, or 8-bit with per block a scale (for MXFP4
// halved, because its weights are stored doubled) and minus the sum of the elements times the weights' offset.
struct Activations {
    uint16_t* values = nullptr;
    int8_t* bytes = nullptr;
    float* scales = nullptr;
    int32_t* offsets = nullptr;
    int blocks = 0;
};

// Sequence of an attention batch: `count` rows at positions from `start`; `pages` of its cache.
struct Span {
    int first_row, count, start;
    const int32_t* pages;
};

// One layer's keys and values of one key/value head: block b of kPositions positions of page p lies at
// chunks[p / kPagesPerChunk] + (p % kPagesPerChunk) * page_bytes + offset + b * block_bytes, keys
// [pair of dimensions][position][2], then values [pair of positions][dimension][2].
struct KVView {
    uint8_t* const* chunks;
    size_t page_bytes;
    size_t offset;
    int head_dim, padded_dim;

    size_t block_bytes() const { return static_cast<size_t>(4) * kPositions * padded_dim; }
    uint16_t* block(const int32_t* pages, int position) const {
        const unsigned at = position, page = pages[at / kPagePositions];
        return reinterpret_cast<uint16_t*>(chunks[page / kPagesPerChunk] + page % kPagesPerChunk * page_bytes + offset +
                                           at % kPagePositions / kPositions * block_bytes());
    }
};

// Up to kQueries query rows of one sequence: bfloat16 [padded_dim] each, what each sees (positions begin to end - 1),
// and where its float output [head_dim] goes.
struct QueryTile {
    int rows = 0;
    const uint16_t* queries[kQueries];
    int begin[kQueries], end[kQueries];
    float* out[kQueries];
};

// What one part of a row of logits adds to its best one and its log probability.
struct Peak {
    float top;    // the highest
    int at;       // the first that is
    float mass;   // sum of e^(logit - top)
    bool broken;  // one is NaN or positive infinity: then nothing else is set
};

struct Kernels {
    const char* name;
    // out[row][column] (+)= x . w (+ bias) for the columns of panels [first, last). bias: padded to whole panels.
    void (*linear)(const MatrixView& w, const Activations& x, int rows, int first, int last, const float* bias,
                   bool accumulate, float* out, size_t out_stride);
    // Asks the memory for the beginning of a panel that will be multiplied soon.
    void (*fetch)(const MatrixView& w, int panel);
    // Elements [begin, end) of one row, begin and end multiples of kBlock (end may be k), into `to` at `row`.
    void (*activate)(const float* x, int k, int begin, int end, Format format, const Activations& to, int row);
    void (*rms_norm)(const float* x, const float* weight, int k, float eps, float* out);
    // x[d], x[d + dim / 2] rotated by the angles with these cosines and sines [dim / 2].
    void (*rope)(const float* x, const float* cosines, const float* sines, int dim, float* out);
    void (*silu_mul)(const float* gate, const float* up, int count, float* out);
    void (*to_bf16)(const float* x, int count, uint16_t* out);
    // out = row `index` of a matrix.
    void (*row)(const MatrixView& w, int index, float* out);
    int (*argmax)(const float* x, int count);
    Peak (*peak)(const float* x, int count);
    // kBlock values to MXFP4: the codes, and the scale byte whose squared error is least among the OCP specification's
    // and its neighbours (of equals the specification's). -1 if a value is not finite.
    int (*quantize_block)(const float* x, uint8_t* codes);
    // Philox words of tokens first to first + 63, first a multiple of 4 (see noise.cpp).
    void (*noise_words)(uint64_t first, uint64_t seed, uint64_t position, uint32_t stream, uint32_t* words);
    // Which of 64 tokens may reach `best` or more with these words: a superset, as bits.
    uint64_t (*contenders)(const float* scores, const uint32_t* words, float best);
    // Softmax and mixture of a tile over the positions `first` to first + kStep - 1, into `partial`: for each row
    // padded_dim sums, their highest score and their mass.
    void (*attention_step)(const KVView& kv, const int32_t* pages, const QueryTile& tile, int first, float scale,
                           float* partial);
    // The rows' results from the partials of all their steps, in order, `stride` floats apart.
    void (*attention_merge)(const QueryTile& tile, const float* partials, int steps, size_t stride, int head_dim,
                            int padded_dim);
};

// Floats of one partial.
constexpr size_t partial_size(int padded_dim) { return static_cast<size_t>(kQueries) * (padded_dim + 2); }

// The best table this processor runs, or the one FOREDRAFT_ISA names (avx512, avx2, portable).
// Raises std::runtime_error when that one is unknown or does not run here.
const Kernels& kernels();

extern const Kernels kPortableKernels;
#if defined(FOREDRAFT_X86)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

}  // namespace foredraft
