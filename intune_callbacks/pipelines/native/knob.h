// A number of a running iterator that tf.data's model knows, and that can be set.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>

#include "tensorflow/core/framework/model.h"

namespace intune {

using tensorflow::data::model::Node;
using tensorflow::data::model::SharedState;

// Members of the model's nodes that have no accessor, reached by legal means.
struct Peek : Node {
  using Node::mu_;
  using Node::parameters_;
};

// One settable number of a running iterator.
class Knob {
 public:
  // The node's `parallelism` or `buffer_size`, with its bounds. No lookups by key: a hash made in this library need
  // not be the one TensorFlow's own library makes.
  static Knob Find(Node* node) {
    Knob knob;
    if (node == nullptr) return knob;
    tensorflow::tf_shared_lock lock((*node).*(&Peek::mu_));
    for (const auto& pair : (*node).*(&Peek::parameters_)) {
      const auto& state = pair.second->state;
      if (pair.first == "cycle_length") knob.high_ = state ? state->value : pair.second->value;
      if ((pair.first == "parallelism" || pair.first == "buffer_size") && state && state->mu) knob.state_ = state;
    }
    return knob;
  }

  explicit operator bool() const { return state_ != nullptr; }

  int64_t Get() const {
    tensorflow::mutex_lock lock(*state_->mu);
    return static_cast<int64_t>(state_->value);
  }

  // The most it takes, 0 for any.
  int64_t High() const { return static_cast<int64_t>(high_); }

  int64_t Set(int64_t wanted) const {
    const double value = std::max(1.0, high_ > 0 ? std::min(static_cast<double>(wanted), high_) : wanted);
    tensorflow::mutex_lock lock(*state_->mu);
    // tf.data's own tuner skips it from now on; it may be reading this in its thread.
    __atomic_store_n(const_cast<bool*>(&state_->tunable), false, __ATOMIC_RELAXED);
    if (state_->value != value) {
      state_->value = value;
      if (state_->cond_var) state_->cond_var->notify_all();
    }
    return static_cast<int64_t>(value);
  }

 private:
  std::shared_ptr<SharedState> state_;
  double high_ = 0.0;
};

}  // namespace intune
