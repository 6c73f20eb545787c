#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
namespace tensorflow {
// What the real ones are, without their annotations.
using mutex = std::shared_mutex;
using mutex_lock = std::unique_lock<mutex>;
using tf_shared_lock = std::shared_lock<mutex>;
}  // namespace tensorflow
namespace tensorflow::data::model {
struct SharedState {
  double value = 1.0;
  const std::shared_ptr<mutex> mu = std::make_shared<mutex>();
  const std::shared_ptr<std::condition_variable_any> cond_var = std::make_shared<std::condition_variable_any>();
  const bool tunable = true;
};
struct Parameter {
  double value = 0.0;
  std::shared_ptr<SharedState> state;
};
class Node {
 public:
  int64_t buffered_elements() const { return buffered; }
  int64_t num_elements() const { return elements; }
  int64_t processing_time() const { return elements * 1000; }
  std::atomic<int64_t> buffered{0}, elements{0};
  std::shared_ptr<SharedState> Parallelism(double most) {
    auto state = std::make_shared<SharedState>();
    parameters_["cycle_length"] = std::make_shared<Parameter>(Parameter{most, nullptr});
    parameters_["parallelism"] = std::make_shared<Parameter>(Parameter{1.0, state});
    return state;
  }

 protected:
  mutable mutex mu_;
  std::map<std::string, std::shared_ptr<Parameter>> parameters_;
};
}  // namespace tensorflow::data::model
