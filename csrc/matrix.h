// Weights in the panels that the kernels read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "kernels.h"

namespace foredraft {

// Memory that starts on a cache line, in large pages where the system has them; zeros at first.
class Buffer {
   public:
    Buffer() = default;
    explicit Buffer(size_t bytes);
    ~Buffer();
    Buffer(Buffer&& other) noexcept;
    Buffer& operator=(Buffer&& other) noexcept;

    uint8_t* data() const { return data_; }
    size_t size() const { return bytes_; }

   private:
    void* start_ = nullptr;
    size_t mapped_ = 0;
    uint8_t* data_ = nullptr;
    size_t bytes_ = 0;
};

class Matrix {
   public:
    // From bfloat16 weights [n, k]; int8 and mxfp4 are quantised here. Raises std::invalid_argument where quantised
    // weights are not finite, as does quantize_mxfp4.
    static std::shared_ptr<Matrix> from_bf16(const uint16_t* weights, int n, int k, Format format);
    // From MXFP4: codes [n, k / 2] (even k in the low nibble) and scales [n, k / 32]. format: mxfp4 or mxfp4_a16.
    static std::shared_ptr<Matrix> from_mxfp4(const uint8_t* codes, const uint8_t* scales, int n, int k, Format format);

    const MatrixView& view() const { return view_; }
    void set_streamed() { view_.streamed = true; }
    size_t bytes() const { return data_.size() + scales_.size(); }

   private:
    Matrix(Format format, int n, int k);
    void put_mxfp4(int row, int block, const uint8_t codes[kBlock], uint8_t scale);

    Buffer data_, scales_;
    MatrixView view_;
};

// Gives memory that the C library keeps for later back to the system.
void release_free_memory();

// MXFP4 of bfloat16 weights [n, k] in the checkpoint's layout (see from_mxfp4). k: a multiple of 32.
void quantize_mxfp4(const uint16_t* weights, int n, int k, uint8_t* codes, uint8_t* scales);

}  // namespace foredraft
