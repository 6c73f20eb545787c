#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "tensorflow/core/framework/types.pb.h"
namespace tensorflow {
using tstring = std::string;
class Tensor {
 public:
  explicit Tensor(std::vector<tstring> strings) : strings_(std::move(strings)) {}
  size_t TotalBytes() const { return 24 * strings_.size(); }
  DataType dtype() const { return DT_STRING; }
  int dims() const { return 1; }
  int64_t dim_size(int) const { return static_cast<int64_t>(strings_.size()); }
  struct Flat {
    const std::vector<tstring>& strings;
    int64_t size() const { return static_cast<int64_t>(strings.size()); }
    const tstring& operator()(int64_t i) const { return strings[i]; }
  };
  template <typename T>
  Flat flat() const {
    return {strings_};
  }

 private:
  std::vector<tstring> strings_;
};
}  // namespace tensorflow
