#pragma once
namespace tensorflow::port {
struct ScopedSetRound {
  explicit ScopedSetRound(int) {}
  ~ScopedSetRound() {}
};
}  // namespace tensorflow::port
