#include "matrix.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <utility>

#include "threads.h"

#if defined(__GLIBC__)
#include <malloc.h>
#endif
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace foredraft {
namespace {

float widen(uint16_t bits) {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}

uint16_t narrow_up(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return static_cast<uint16_t>((bits + 0xffffu) >> 16);
}

// To the nearest integer, ties to even, for magnitudes below 2^22.
float nearest(float x) {
    constexpr float big = 12582912.0f;
    return (x + big) - big;
}

void require_finite(bool finite) {
    if (!finite) throw std::invalid_argument("a weight has NaN or infinite elements");
}

}  // namespace

Buffer::Buffer(size_t bytes) : bytes_(bytes) {
    if (!bytes) return;
#if defined(__linux__)
    constexpr size_t large_page = size_t{1} << 21;
    if (bytes >= large_page) {
        mapped_ = (bytes / large_page + 2) * large_page;
        void* start = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (start == MAP_FAILED) throw std::bad_alloc();
        start_ = start;
        const uintptr_t address = reinterpret_cast<uintptr_t>(start);
        data_ = reinterpret_cast<uint8_t*>((address + large_page - 1) / large_page * large_page);
        // Whole large pages only: the rest of the last one would be memory for nothing.
        const size_t whole = bytes / large_page * large_page;
        madvise(data_, whole, MADV_HUGEPAGE);
        madvise(data_ + whole, large_page, MADV_NOHUGEPAGE);
        return;
    }
#endif
    start_ = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (!start_) throw std::bad_alloc();
    data_ = static_cast<uint8_t*>(start_);
    std::memset(data_, 0, bytes);
}

Buffer::~Buffer() {
#if defined(__linux__)
    if (mapped_) {
        munmap(start_, mapped_);
        return;
    }
#endif
    std::free(start_);
}

Buffer::Buffer(Buffer&& other) noexcept { *this = std::move(other); }

Buffer& Buffer::operator=(Buffer&& other) noexcept {
    std::swap(start_, other.start_);
    std::swap(mapped_, other.mapped_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
}

void quantize_mxfp4(const uint16_t* weights, int n, int k, uint8_t* codes, uint8_t* scales) {
    std::atomic<bool> finite{true};
    ThreadPool::instance().run([&](const Team& team) {
        int begin, end;
        team.share(n, 1, begin, end);
        float values[kBlock];
        uint8_t unpacked[kBlock];
        for (int row = begin; row < end; ++row)
            for (int block = 0; block < k / kBlock; ++block) {
                const size_t at = static_cast<size_t>(row) * k + static_cast<size_t>(block) * kBlock;
                for (int i = 0; i < kBlock; ++i) values[i] = widen(weights[at + i]);
                const int scale = kernels().quantize_block(values, unpacked);
                if (scale < 0) finite = false;
                scales[at / kBlock] = static_cast<uint8_t>(scale);
                for (int i = 0; i < kBlock; i += 2)
                    codes[(at + i) / 2] = static_cast<uint8_t>(unpacked[i] | unpacked[i + 1] << 4);
            }
    });
    require_finite(finite);
}

void release_free_memory() {
#if defined(__GLIBC__)
    malloc_trim(0);
#endif
}

Matrix::Matrix(Format format, int n, int k) {
    const int panels = (n + kPanel - 1) / kPanel, blocks = (k + kBlock - 1) / kBlock;
    data_ = Buffer(static_cast<size_t>(panels) * blocks * block_bytes(format));
    scales_ = Buffer(static_cast<size_t>(panels) * blocks * scale_bytes(format));
    view_ = {format, n, k, panels, blocks, data_.data(), scales_.data(), false};
}

void Matrix::put_mxfp4(int row, int block, const uint8_t codes[kBlock], uint8_t scale) {
    constexpr int half_panel = kPanel / 2;
    const int panel = row / kPanel, column = row % kPanel;
    const size_t index = static_cast<size_t>(panel) * view_.blocks + block;
    scales_.data()[index * kPanel + column] = scale;
    uint8_t* to = data_.data() + index * block_bytes(view_.format) +
                  column / half_panel * (kBlock * half_panel / 2) + column % half_panel * 4;
    for (int group = 0; group < kBlock / 8; ++group) {
        const uint8_t* own = codes + 8 * group;
        uint8_t bytes[4];
        for (int i = 0; i < 4; ++i)
            bytes[i] = view_.format == Format::mxfp4
                           ? static_cast<uint8_t>(own[i] | own[i + 4] << 4)
                           // Word i / 2, whose nibble j belongs to pair j.
                           : static_cast<uint8_t>(own[i / 2 + 4 * (i % 2)] | own[i / 2 + 4 * (i % 2) + 2] << 4);
        std::memcpy(to + static_cast<size_t>(group) * 4 * half_panel, bytes, 4);
    }
}

std::shared_ptr<Matrix> Matrix::from_mxfp4(const uint8_t* codes, const uint8_t* scales, int n, int k, Format format) {
    std::shared_ptr<Matrix> matrix(new Matrix(format, n, k));
    ThreadPool::instance().run([&](const Team& team) {
        int begin, end;
        team.share(n, kPanel, begin, end);
        for (int row = begin; row < end; ++row)
            for (int block = 0; block < k / kBlock; ++block) {
                const size_t at = static_cast<size_t>(row) * k + static_cast<size_t>(block) * kBlock;
                uint8_t unpacked[kBlock];
                for (int i = 0; i < kBlock; ++i) unpacked[i] = codes[(at + i) / 2] >> (i % 2 * 4) & 15;
                matrix->put_mxfp4(row, block, unpacked, scales[at / kBlock]);
            }
    });
    return matrix;
}

std::shared_ptr<Matrix> Matrix::from_bf16(const uint16_t* weights, int n, int k, Format format) {
    std::shared_ptr<Matrix> matrix(new Matrix(format, n, k));
    const MatrixView& view = matrix->view_;
    uint8_t* data = matrix->data_.data();
    uint16_t* scales = reinterpret_cast<uint16_t*>(matrix->scales_.data());
    std::atomic<bool> finite{true};
    ThreadPool::instance().run([&](const Team& team) {
        int begin, end;
        team.share(n, kPanel, begin, end);
        for (int row = begin; row < end; ++row)
            for (int block = 0; block < view.blocks; ++block) {
                const int column = row % kPanel;
                const size_t index = static_cast<size_t>(row / kPanel) * view.blocks + block;
                uint8_t* to = data + index * block_bytes(format);
                const uint16_t* from = weights + static_cast<size_t>(row) * k + block * kBlock;
                const int count = std::min(kBlock, k - block * kBlock);
                if (format == Format::bf16) {
                    for (int i = 0; i < count; ++i)
                        reinterpret_cast<uint16_t*>(to)[i / 2 * 2 * kPanel + 2 * column + i % 2] = from[i];
                    continue;
                }
                float values[kBlock] = {};
                float top = 0.0f;
                for (int i = 0; i < count; ++i) {
                    values[i] = widen(from[i]);
                    top = std::isnan(values[i]) ? INFINITY : std::max(top, std::fabs(values[i]));
                }
                if (format != Format::int8) {
                    uint8_t codes[kBlock];
                    const int scale = kernels().quantize_block(values, codes);
                    if (scale < 0) finite = false;
                    matrix->put_mxfp4(row, block, codes, static_cast<uint8_t>(scale));
                    continue;
                }
                if (!std::isfinite(top)) finite = false;
                // What is smaller is nothing, and the inverse of its scale would be infinite.
                const uint16_t scale = top > 1e-30f ? narrow_up(top / 127.0f) : 0;
                scales[index * kPanel + column] = scale;
                const float inverse = scale ? 1.0f / widen(scale) : 0.0f;
                for (int i = 0; i < kBlock; ++i)
                    to[i / 4 * 4 * kPanel + 4 * column + i % 4] =
                        static_cast<uint8_t>(static_cast<int>(nearest(values[i] * inverse)) + 128);
            }
        // Columns that do not exist hold the offset, which stands for zero.
        if (format == Format::int8 && end == n)
            for (int column = (n - 1) % kPanel + 1; begin < end && column < kPanel; ++column)
                for (int block = 0; block < view.blocks; ++block) {
                    uint8_t* to = data + (static_cast<size_t>(view.panels - 1) * view.blocks + block) * block_bytes(format);
                    for (int i = 0; i < kBlock; ++i) to[i / 4 * 4 * kPanel + 4 * column + i % 4] = 128;
                }
    });
    require_finite(finite);
    return matrix;
}

}  // namespace foredraft
