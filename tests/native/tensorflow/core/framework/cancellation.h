#pragma once
#include <atomic>
namespace tensorflow {
class CancellationManager {
 public:
  bool IsCancelled() const { return cancelled_; }
  void StartCancel() { cancelled_ = true; }

 private:
  std::atomic<bool> cancelled_{false};
};
}  // namespace tensorflow
