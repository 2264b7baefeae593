// A C interface to ExecuTorch for device_runtime/backends/executorch.py, which is its only caller.
//
// What fails returns false or null, and muster_failure() then says why on that thread. A graph serves one thread at a
// time. The bytes of a program must outlive what muster_load() makes of them.

#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <executorch/extension/data_loader/buffer_data_loader.h>
#include <executorch/extension/memory_allocator/malloc_memory_allocator.h>
#include <executorch/extension/tensor/tensor.h>
#include <executorch/runtime/executor/program.h>
#include <executorch/runtime/platform/platform.h>
#include <executorch/runtime/platform/runtime.h>

namespace et = executorch::runtime;
namespace ext = executorch::extension;

// The wheel has this class in a library but not in its headers.
namespace executorch::extension::threadpool {
class ThreadPool {
 public:
  bool _unsafe_reset_threadpool(uint32_t threads);
};
ThreadPool* get_threadpool();
}  // namespace executorch::extension::threadpool

namespace {

constexpr size_t kEnoughToRead = 1000;
thread_local std::string words;  // what ExecuTorch logged as an error during this call, and how the call failed

void note(et_timestamp_t, et_pal_log_level_t level, const char*, const char*, size_t, const char* text, size_t length) {
  if ((level != kError && level != kFatal) || words.size() > kEnoughToRead) return;
  if (!words.empty()) words += "; ";
  words.append(text, length);
}

// ExecuTorch would end the process when one of its checks fails.
void throw_instead_of_abort() {
  throw std::runtime_error("an internal check failed");
}

void set_up_once() {
  static const bool done = [] {
    et::PalImpl platform = et::PalImpl::create(note, __FILE__);
    platform.abort = throw_instead_of_abort;
    et::register_pal(platform);
    et::runtime_init();
    ext::threadpool::ThreadPool* pool = ext::threadpool::get_threadpool();
    return pool != nullptr && pool->_unsafe_reset_threadpool(1);
  }();
  if (!done) throw std::runtime_error("cannot limit ExecuTorch to one thread");
}

void check(et::Error error) {
  if (error != et::Error::Ok) throw std::runtime_error(et::to_string(error));
}

template <typename T>
T got(et::Result<T> result) {
  check(result.error());
  return std::move(*result);
}

template <typename Body>
bool attempt(Body body) {
  words.clear();
  try {
    body();
    return true;
  } catch (const std::exception& error) {
    words = std::string(error.what()) + (words.empty() ? "" : ": ") + words;
  }
  return false;
}

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

// A method with the memory it works in.
class Loaded {
 public:
  Loaded(const et::Program& program, const char* name)
      : arenas_(spans_of(got(program.method_meta(name)))),
        planned_({spans_.data(), spans_.size()}),
        memory_(&lasting_, &planned_, &temporary_),
        method(got(program.load_method(name, &memory_))) {}

  et::TensorInfo port(bool output, size_t index) const {
    const et::MethodMeta meta = method.method_meta();
    return got(output ? meta.output_tensor_meta(index) : meta.input_tensor_meta(index));
  }

 private:
  using Arenas = std::vector<std::unique_ptr<void, Free>>;

  Arenas spans_of(const et::MethodMeta& meta) {
    Arenas arenas;
    for (size_t i = 0; i < meta.num_memory_planned_buffers(); ++i) {
      const size_t size = got(meta.memory_planned_buffer_size(i));
      arenas.emplace_back(std::calloc(size, 1));
      if (size != 0 && arenas.back() == nullptr) throw std::bad_alloc();
      spans_.emplace_back(static_cast<uint8_t*>(arenas.back().get()), size);
    }
    return arenas;
  }

  std::vector<et::Span<uint8_t>> spans_;
  Arenas arenas_;
  ext::MallocMemoryAllocator lasting_, temporary_;
  et::HierarchicalAllocator planned_;
  et::MemoryManager memory_;

 public:
  et::Method method;
};

}  // namespace

struct Graph {
  Graph(const void* data, size_t size)
      : loader(data, size),
        program(got(et::Program::load(&loader, et::Program::Verification::InternalConsistency))),
        forward(program, "forward") {
    for (size_t i = 0; i < forward.method.inputs_size(); ++i) {
      const et::TensorInfo info = forward.port(false, i);
      std::vector<executorch::aten::SizesType> sizes(info.sizes().begin(), info.sizes().end());
      inputs.push_back(ext::make_tensor_ptr(std::move(sizes), nullptr, info.scalar_type()));
    }
  }

  ext::BufferDataLoader loader;
  et::Program program;
  Loaded forward;
  std::vector<ext::TensorPtr> inputs;
  std::string text;

  void run(void* const* from, void* const* to);
};

void Graph::run(void* const* from, void* const* to) {
  et::Method& method = forward.method;
  for (size_t i = 0; i < method.outputs_size(); ++i) {
    const et::TensorInfo info = forward.port(true, i);
    if (!info.is_memory_planned()) check(method.set_output_data_ptr(to[i], info.nbytes(), i));
  }
  // Inputs last: one that is returned as it is must be read from the caller's input, and is copied below.
  for (size_t i = 0; i < inputs.size(); ++i) {
    inputs[i]->unsafeGetTensorImpl()->set_data(from[i]);
    check(method.set_input(*inputs[i], i));
  }
  check(method.execute());
  for (size_t i = 0; i < method.outputs_size(); ++i) {
    const auto& made = method.get_output(i).toTensor();
    if (made.nbytes() != forward.port(true, i).nbytes()) throw std::runtime_error("an output changed its size");
    if (made.const_data_ptr() != to[i]) std::memcpy(to[i], made.const_data_ptr(), made.nbytes());
  }
}

extern "C" {

const char* muster_failure() {
  return words.c_str();
}

// To be called first, by a process that may still start threads: ExecuTorch starts some before it is told to have one.
bool muster_set_up() {
  return attempt(set_up_once);
}

Graph* muster_load(const void* program, size_t size) {
  Graph* graph = nullptr;
  attempt([&] {
    graph = new Graph(program, size);
  });
  return graph;
}

void muster_unload(Graph* graph) {
  delete graph;
}

size_t muster_count(const Graph* graph, bool output) {
  const et::Method& method = graph->forward.method;
  return output ? method.outputs_size() : method.inputs_size();
}

// The element type (a ScalarType) and the sizes of a port; `sizes` belong to the program.
bool muster_port(const Graph* graph, bool output, size_t index, int* type, const int32_t** sizes, size_t* rank) {
  return attempt([&] {
    const et::TensorInfo info = graph->forward.port(output, index);
    for (size_t i = 0; i < info.dim_order().size(); ++i) {
      if (info.dim_order()[i] != i) throw std::runtime_error("a tensor is not in C order");
    }
    *type = static_cast<int>(info.scalar_type());
    *sizes = info.sizes().data();
    *rank = info.sizes().size();
  });
}

// The bytes of the one tensor that a method without inputs returns, valid until the next call with this graph.
bool muster_constant(Graph* graph, const char* name, const char** data, size_t* size) {
  return attempt([&] {
    Loaded constant(graph->program, name);
    check(constant.method.execute());
    const et::EValue& value = constant.method.get_output(0);
    if (!value.isTensor()) throw std::runtime_error("not a tensor");
    graph->text.assign(static_cast<const char*>(value.toTensor().const_data_ptr()), value.toTensor().nbytes());
    *data = graph->text.data();
    *size = graph->text.size();
  });
}

// Runs once. inputs[i] and outputs[i] point to C-ordered memory of the type and sizes that muster_port() told.
bool muster_run(Graph* graph, void* const* inputs, void* const* outputs) {
  return attempt([&] { graph->run(inputs, outputs); });
}

}  // extern "C"
