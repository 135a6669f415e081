#pragma once

#include <cstddef>
#include <utility>

#include "detail/call.hpp"

namespace kvrelay {

/// The target's scores of every token that could come next, in Python's own memory, which this object holds.
/// What data() points to stays valid until the object is destroyed or moved from, on whichever thread.
class Logits {
 public:
  const float* data() const noexcept { return data_; }
  std::size_t size() const noexcept { return size_; }  // ids that the tokenizer knows
  const float* begin() const noexcept { return data_; }
  const float* end() const noexcept { return data_ + size_; }
  float operator[](std::size_t id) const noexcept { return data_[id]; }

 private:
  friend class Pipeline;
  /// The GIL is held.
  explicit Logits(pybind11::object array) {
    const pybind11::buffer_info memory = pybind11::reinterpret_borrow<pybind11::buffer>(array).request();
    data_ = static_cast<const float*>(memory.ptr);
    size_ = static_cast<std::size_t>(memory.size);
    array_ = detail::Ref(std::move(array));
  }

  detail::Ref array_;
  const float* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace kvrelay
