// A stack of decoder layers and the paged cache of keys and values that it works on.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels.h"
#include "matrix.h"
#include "threads.h"

namespace foredraft {

// Pages of keys and values, each for all layers and heads. Which page belongs to whom is the caller's business.
class PagePool {
   public:
    PagePool(int layers, int kv_heads, int head_dim);
    PagePool(const PagePool&) = delete;

    // Makes pages 0 to `pages` - 1 exist.
    void reserve(int pages);
    KVView view(int layer, int kv_head) const;
    int layers() const { return layers_; }
    int kv_heads() const { return kv_heads_; }
    int head_dim() const { return head_dim_; }
    int pages() const { return static_cast<int>(kPagesPerChunk * chunks_.size()); }
    size_t page_bytes() const { return page_bytes_; }
    size_t bytes() const { return page_bytes_ * kPagesPerChunk * chunks_.size(); }

   private:
    int layers_, kv_heads_, head_dim_, padded_dim_;
    size_t head_bytes_, page_bytes_;
    std::vector<Buffer> chunks_;
    std::vector<uint8_t*> addresses_;
};

// Bias vectors are padded to whole panels. qkv: the first layer's may have columns of its own number (see forward).
struct LayerWeights {
    std::vector<float> input_norm, q_norm, k_norm, post_norm;
    std::vector<float> qkv_bias, out_bias, gate_bias, up_bias, down_bias;
    std::shared_ptr<Matrix> qkv, out, gate, up, down;
};

struct DecoderShape {
    int hidden, inner, heads, kv_heads, head_dim;
    float eps;
};

// Rows of a flat batch by sequence, and what a row sees: the positions up to its own (causal) or up to the last row of
// its sequence, and of these the last `window` only (0: all).
struct Rows {
    std::vector<Span> spans;
    int count = 0;
};

class Decoder {
   public:
    // frequencies: of the rotated pairs [head_dim / 2]; factor: on cosine and sine. kv_layers: if not empty, layer i has
    // queries only and reads the keys and values of layer kv_layers[i] of the pool, another decoder's.
    Decoder(DecoderShape shape, std::vector<LayerWeights> layers, std::vector<float> frequencies, float factor,
            std::vector<int> kv_layers);
    Decoder(const Decoder&) = delete;

    // hidden [rows, hidden] in place. taps: the output of layer tap_layers[i] goes to columns i * hidden of taps
    // [rows, tap_layers.size() * hidden]. windows, causal: one entry per layer. attention_input: what the first layer's
    // qkv multiplies, [rows, attention_width()], in place of the normed hidden; null where that is not wanted.
    void forward(float* hidden, const float* attention_input, const Rows& rows, PagePool& pool,
                 const std::vector<int>& tap_layers, float* taps, const std::vector<int>& windows,
                 const std::vector<bool>& causal);

    // Writes every layer's keys and values computed from `context` [rows, hidden] (DFlash's KV injection).
    void inject(const float* context, const Rows& rows, PagePool& pool);

    int layers() const { return static_cast<int>(layers_.size()); }
    int attention_width() const { return layers_.front().qkv->view().k; }
    size_t weight_bytes() const;

   private:
    struct Scratch;

    void check(const PagePool& pool) const;
    void prepare(const Rows& rows, int threads);
    void put_query(const LayerWeights& layer, const float* row, int position, int at, int query, float* room);
    void write_queries(const Team& team, const LayerWeights& layer, const Rows& rows);
    void write_keys_values(const Team& team, const LayerWeights& layer, const Rows& rows, const PagePool& pool, int index,
                           bool queries);
    template <class Visit>
    void for_tiles(const Rows& rows, int window, bool causal, const Visit& visit);
    void attend(const Team& team, const Rows& rows, const PagePool& pool, int index, int window, bool causal);

    DecoderShape shape_;
    std::vector<LayerWeights> layers_;
    std::vector<float> frequencies_;
    float factor_;
    std::vector<int> kv_layers_;
    std::vector<float> cosines_, sines_;
    std::unique_ptr<Scratch, void (*)(Scratch*)> scratch_;
};

// Single operations over rows, on the pool. `out` [rows, n].
void linear(const Matrix& weight, const float* x, int rows, const float* bias, float* out);
void rms_norm(const float* x, const float* weight, int rows, int k, float eps, float* out);
void silu_mul(const float* gate_up, int rows, int inner, float* out);
void rope(const float* x, const float* cosines, const float* sines, int rows, int heads, int head_dim, float* out);
void argmax(const float* x, int rows, int count, int64_t* out);
// ids: as argmax. log_probs: of these ids, NaN where the row has NaN, a highest value that is infinite, or only -inf.
void best(const float* x, int rows, int count, int64_t* ids, float* log_probs);
void embedding(const Matrix& table, const int64_t* ids, int rows, float* out);

}  // namespace foredraft
