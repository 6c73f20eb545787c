#pragma once
#include <functional>
namespace tensorflow::thread {
class ThreadPoolInterface {
 public:
  virtual ~ThreadPoolInterface() = default;
  virtual void Schedule(std::function<void()> fn) = 0;
  virtual int NumThreads() const = 0;
  virtual int CurrentThreadId() const = 0;
};
}  // namespace tensorflow::thread
