#pragma once
namespace tensorflow::port {
struct ScopedFlushDenormal {
  ~ScopedFlushDenormal() {}
};
}  // namespace tensorflow::port
