#pragma once
namespace tensorflow {
struct ScopedPerThreadMaxParallelism {
  explicit ScopedPerThreadMaxParallelism(int) {}
  ~ScopedPerThreadMaxParallelism() {}
};
}  // namespace tensorflow
