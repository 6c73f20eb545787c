// What outlives iterators: the counters and wanted values of each stage and sink, by pipeline and stage name.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "stage.h"
#include "tensorflow/core/framework/tensor.h"

namespace intune {

class Sink {
 public:
  struct Reading {
    int64_t delivered = 0, iterators = 0, samples = 0;
    double wait_s = 0.0;
  };

  void Opened() {
    std::unique_lock<std::mutex> lock(mu_);
    ++reading_.iterators;
  }

  // `element` is null when nothing was delivered: at the end, or on an error.
  void Asked(double wait_s, const std::vector<tensorflow::Tensor>* element) {
    std::unique_lock<std::mutex> lock(mu_);
    reading_.wait_s += wait_s;
    if (element == nullptr) return;
    reading_.samples += Length(*element);
    ++reading_.delivered;
  }

  Reading Read() {
    std::unique_lock<std::mutex> lock(mu_);
    return reading_;
  }

 private:
  // Of the first tensor that has one; a ragged or sparse tensor is a variant here, which does not tell.
  static int64_t Length(const std::vector<tensorflow::Tensor>& element) {
    for (const auto& part : element)
      if (part.dtype() != tensorflow::DT_VARIANT && part.dims() > 0) return part.dim_size(0);
    return 0;
  }

  std::mutex mu_;
  Reading reading_;
};

struct Pipeline {
  std::mutex mu;
  std::map<std::string, std::shared_ptr<Stage>> stages;
  const std::shared_ptr<Sink> sink = std::make_shared<Sink>();

  std::shared_ptr<Stage> Find(const std::string& name) {
    std::unique_lock<std::mutex> lock(mu);
    auto& stage = stages[name];
    if (!stage) stage = std::make_shared<Stage>();
    return stage;
  }
};

class Registry {
 public:
  // Never destroyed: pool threads may outlive the destructors of static objects.
  static Registry& Get() {
    static Registry* registry = new Registry;
    return *registry;
  }

  std::shared_ptr<Pipeline> Find(const std::string& name) {
    std::unique_lock<std::mutex> lock(mu_);
    auto& pipeline = pipelines_[name];
    if (!pipeline) pipeline = std::make_shared<Pipeline>();
    return pipeline;
  }

  // Null if nothing was ever known about it.
  std::shared_ptr<Pipeline> Known(const std::string& name) {
    std::unique_lock<std::mutex> lock(mu_);
    const auto found = pipelines_.find(name);
    return found == pipelines_.end() ? nullptr : found->second;
  }

  void Release(const std::string& name) {
    std::shared_ptr<Pipeline> last;  // destroyed after the lock is given back
    std::unique_lock<std::mutex> lock(mu_);
    const auto found = pipelines_.find(name);
    if (found == pipelines_.end()) return;
    last = std::move(found->second);
    pipelines_.erase(found);
  }

 private:
  std::mutex mu_;
  std::map<std::string, std::shared_ptr<Pipeline>> pipelines_;
};

}  // namespace intune
