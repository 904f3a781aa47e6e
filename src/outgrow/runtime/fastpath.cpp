// Lets ops of a step that need nobody's care run without a detour through Python.
//
// A dispatch mode in Python costs 50 microseconds and more for each op, as large ops leave nothing of the interpreter in
// the caches. In a step that goes as planned most ops need none of what the mode does: they write to nothing, nothing
// is made anew from them, and they fit the budget. One step is learned: of each op, by its number, what it was called
// on and what it needs. In those that follow, an op that is the one expected, and that fits, goes past the mode. Any
// other is the mode's.
//
// It sees ops on a dispatch key above autograd, before composite ones come apart: what is expected at a number may
// stand for several ops in turn.
//
// And it has autograd sum up gradients in place, as it does where nobody looks: see `is_sum_of_gradients`.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/stack.h>
#include <ATen/record_function.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/tensor.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <typeinfo>
#include <unordered_map>
#include <vector>

namespace {

constexpr auto kKey = c10::DispatchKey::TESTING_ONLY_GenericMode;  // PyTorch has it and makes no use of it
constexpr int64_t kLargeRise = 256 << 10;  // as in room.py: ops below are not worth a look at the resident set
constexpr int64_t kLittle = 4 << 10;       // bytes that are worth nobody's attention, at an op or above a level
constexpr size_t kLeastBlock = 64 << 10;   // as in arena.cpp: smaller ones are not counted
// What may be said of an op beside its bytes; as in fastpath.py.
constexpr int64_t kGated = 1ll << 62, kWrites = 1ll << 61, kDraws = 1ll << 60, kBytes = kDraws - 1;
constexpr size_t kCodeBytes = 320 << 10;   // as in reserve.py: what a library may take from the heap

const c10::DispatchKeySet kModes({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot});
// Where one is on, an op was asked for inside `torch.vmap`: on tensors around the true ones. When it is called on those,
// none is.
const c10::DispatchKeySet kInsideVmap({c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                                       c10::DispatchKey::FuncTorchDynamicLayerBackMode});

struct Count {  // as in arena.cpp
  std::atomic<int64_t> bytes, most;
};

// With how many say so, since one may have come to lie where another lay.
using Storages = std::unordered_map<const void*, int64_t>;

// What is expected at a number: an operator, what its call looks like, and how many ops in turn it stands for.
struct Expected {
  const void* op;
  uint64_t look;
  int64_t ops;
  int64_t rise;      // bytes that it adds at its worst moment
  int64_t flags;     // kGated (it may be done in another way where it is refused some of them), kWrites, kDraws
  uint64_t written;  // a bit for each argument that it writes to
  int64_t first_bound, bounds;  // where in `State::bounds` its sizes are, which it may not pass, and how many
};

// Shared with fastpath.py, field by field.
struct State {
  int64_t learns, passes;  // whether the step is learned, and whether ops may pass
  int64_t number;          // of the next op of the step
  int64_t length;          // of `needs`, and of each half of `expected`
  int64_t bell;            // somebody wants Python to see the next op, as memory is free by now
  int64_t level;           // bytes that the step comes to at its most: below, that memory may as well wait
  int64_t open;            // while it holds less than so many bytes, the allocator refuses nothing that fits the budget
  int64_t loose;           // whether ops may be smaller than those that were learned, which goes on and on
  int64_t modes;           // how many dispatch modes there are, ours with them
  int64_t wraps;           // whether an op was given a tensor whose class runs ops itself
  const void* hooks;       // the saved-tensor hook for which it is known that it keeps no address
  int64_t budget;          // bytes
  int64_t peak;            // the highest live bytes at any op that passed
  int64_t passed;          // ops that did
  int64_t device;          // the number of the GPU that is trained on; -1 for the CPU
  int64_t stream;          // the one of that GPU that the step began on
  int64_t limit;           // what the resident set may be, in bytes
  int64_t statm, page;     // the open /proc/self/statm, and bytes of a page there
  const int64_t* needs;    // of each op what it adds, in bytes, and what else there is to say; -1: it needs care
  Expected* expected;      // what stands for one op, by its number, and then what stands for several, by that of the first
  std::vector<int64_t>* bounds;        // of ops that may be of other sizes than were learned
  const uint8_t* seen;                 // of each of those whether Python has to see it under this plan
  const std::atomic<int64_t>* booked;  // live bytes that the ledger knows of
  Count* count;                        // live bytes of what passed
  void (*count_in)(void*);
  int (*counts)(void*, void*);         // whether the memory at an address is a block that counts there
  const Storages* books;               // the storages that the ledger counts itself
  void (*keep_under)(size_t, int, size_t, int);
  void (*let_go_of)(const void*);  // has nobody of ours hold a storage any more, nor read it
};

thread_local State* state = nullptr;  // of the step that runs on this thread

// Of the step on a GPU, whose backward pass runs on a thread of autograd's own. The key is on there too, as it was where
// the pass was asked for.
std::atomic<State*> state_of_gpu{nullptr};

std::mutex looking;  // at what follows: two sessions may train on two threads

// Storages to which a write is never let pass, as somebody has to know of each: saved values lie in them, or recipes read
// them.
Storages followed;

// Storages whose bytes are away, on their way, or back ahead of their use: who looks at one has to be told to wait. Also
// with how many say so: one that has ended may be found to have only once another lies where it lay, and is parked too.
Storages parked;

void note(Storages& storages, const void* storage, bool is_there) {
  const std::lock_guard guard(looking);
  if (is_there) {
    ++storages[storage];
  } else if (const auto known = storages.find(storage); known != storages.end() && --known->second <= 0) {
    storages.erase(known);
  }
}

uint64_t mix(uint64_t hash, uint64_t word) {
  hash = (hash ^ word) * 0x9E3779B97F4A7C15ull;
  return hash ^ (hash >> 29);
}

constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);

c10::CachingDeviceAllocator::DeviceStats stats_of(int64_t device) {
  return c10::getDeviceAllocator(c10::kCUDA)->getDeviceStats(static_cast<c10::DeviceIndex>(device));
}

// Bytes that PyTorch's allocator has given out on a GPU.
int64_t allocated_bytes(int64_t device) { return stats_of(device).allocated_bytes[kAll].current; }

// Whether a tensor is a window on ordinary memory of a device; if it is, its look is added.
bool add_look(uint64_t& hash, const at::Tensor& tensor, bool loose) {
  if (!tensor.defined()) {
    hash = mix(hash, 1);
    return true;
  }
  const c10::DispatchKeySet keys = tensor.key_set();
  if (!(tensor.is_cpu() || tensor.is_cuda()) || tensor.layout() != c10::kStrided || keys.has(c10::DispatchKey::Python) ||
      tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides() || tensor.is_nested())
    return false;
  hash = mix(hash, keys.raw_repr());
  hash = mix(hash, static_cast<uint64_t>(tensor.scalar_type()));
  if (loose) {
    hash = mix(hash, 2 * tensor.dim() + tensor.is_contiguous());
    return true;
  }
  for (const int64_t size : tensor.sizes()) hash = mix(hash, size);
  for (const int64_t stride : tensor.strides()) hash = mix(hash, stride);
  return true;
}

// What tells two calls apart as far as memory and dispatch go; 0 if there is something among the arguments that nobody
// here knows. Numbers with a fraction change no sizes; and where those may be others, so may whole numbers.
uint64_t look_of(const State& now, c10::DispatchKeySet keys, const torch::jit::Stack& stack, size_t count) {
  const bool loose = now.loose;
  uint64_t hash = mix(1, keys.raw_repr());
  for (size_t i = stack.size() - count; i < stack.size(); ++i) {
    const c10::IValue& item = stack[i];
    if (item.isTensor()) {
      if (!add_look(hash, item.toTensor(), loose)) return 0;
    } else if (item.isNone()) {
      hash = mix(hash, 2);
    } else if (item.isInt()) {
      hash = mix(hash, loose ? 7 : item.toInt());
    } else if (item.isBool()) {
      hash = mix(hash, 3 + item.toBool());
    } else if (item.isDouble() || item.isComplexDouble() || item.isString() || item.isDevice()) {
      hash = mix(hash, 5);
    } else if (item.isList()) {
      for (const c10::IValue& inner : item.toListRef()) {
        if (inner.isTensor()) {
          if (!add_look(hash, inner.toTensor(), loose)) return 0;
        } else if (inner.isInt()) {
          hash = mix(hash, loose ? 7 : inner.toInt());
        } else if (inner.isNone()) {
          hash = mix(hash, 2);
        } else if (inner.isBool()) {
          hash = mix(hash, 3 + inner.toBool());
        } else if (inner.isDouble()) {
          hash = mix(hash, 5);
        } else {
          return 0;
        }
      }
      hash = mix(hash, 6);
    } else {
      return 0;
    }
  }
  return hash | 1;
}

// Sees each size and each whole number among the arguments of a call, in order.
template <typename See>
void see_sizes(const torch::jit::Stack& stack, size_t count, See&& see) {
  const auto see_tensor = [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    for (const int64_t size : tensor.sizes()) see(size, true);
  };
  for (size_t i = stack.size() - count; i < stack.size(); ++i) {
    const c10::IValue& item = stack[i];
    if (item.isTensor()) {
      see_tensor(item.toTensor());
    } else if (item.isInt()) {
      see(item.toInt(), false);
    } else if (item.isList()) {
      for (const c10::IValue& inner : item.toListRef()) {
        if (inner.isTensor())
          see_tensor(inner.toTensor());
        else if (inner.isInt())
          see(inner.toInt(), false);
      }
    }
  }
}

// Whether a call is no larger than the one that was learned, and so takes no more. The numbers that a view is made with
// do not matter: it takes nothing.
bool is_within(const State& now, const Expected& next, const torch::jit::Stack& stack, size_t count) {
  if (!now.loose) return true;
  int64_t seen = 0;
  bool is_smaller = true;
  see_sizes(stack, count, [&](int64_t size, bool of_tensor) {
    if (seen < next.bounds && (of_tensor || next.rise > 0) && size > (*now.bounds)[next.first_bound + seen])
      is_smaller = false;
    ++seen;
  });
  return is_smaller && seen == next.bounds;
}

// Whether none of the ops that a call stands for has to be seen by Python.
bool may_go_unseen(const State& now, int64_t first, int64_t ops) {
  return !now.loose || std::none_of(now.seen + first, now.seen + first + ops, [](uint8_t is_seen) { return is_seen; });
}

// Whether a library would find memory on the heap: where there is none, oneDNN ends the process.
bool heap_has_room() {
  void* volatile block = std::malloc(kCodeBytes);
  std::free(block);
  return block != nullptr;
}

// As faults.py says it of errors in Python.
bool is_out_of_memory(const std::string& words) {
  for (const char* const text :
       {"out of memory", "can't allocate memory", "std::bad_alloc", "could not create a primitive", "could not create a memory",
        "could not create an engine", "could not execute a primitive", "can't start new thread"})
    if (words.find(text) != std::string::npos) return true;
  return false;
}

// A dispatch mode is off, and new blocks on the CPU are counted, while this lives.
class Passing {
 public:
  explicit Passing(State& now) : now_(now), modes_off_(kModes) {
    if (now_.count == nullptr) return;
    now_.count->most = now_.count->bytes + *now_.booked;
    now_.count_in(now_.count);
  }
  ~Passing() {
    if (now_.count == nullptr) return;
    now_.count_in(nullptr);
    now_.peak = std::max(now_.peak, now_.count->most.load());
  }
  Passing(const Passing&) = delete;
  Passing& operator=(const Passing&) = delete;

 private:
  State& now_;
  c10::impl::ExcludeDispatchKeyGuard modes_off_;
};

// --- sums of gradients ---

// A node's turn in a backward pass.
struct Turn {
  const torch::autograd::Node* node = nullptr;
  int pass = -1;
  bool operator==(const Turn& other) const { return node == other.node && pass == other.pass; }
};

// Nodes whose formulas run on this thread, the innermost last, and whether the mode was hidden before each.
struct Running {
  Turn turn;
  bool was_hidden;
};
thread_local std::vector<Running> running;
thread_local Turn ended;                 // whose formula has ended last
thread_local at::CallbackHandle on_nodes = at::INVALID_CALLBACK_HANDLE;

Turn this_turn() {
  return {torch::autograd::get_current_node().get(), torch::autograd::get_current_graph_task_id()};
}

// While a node's own code runs, the one mode of the step is off the stack: PyTorch takes another formula where it finds a
// mode (`isTensorSubclassLike`), of a product for one, and that gives other bits. The ops of the formula come here first,
// and the mode is back for each. Unpack hooks that run in there, and what they run, find no mode either.
using Modes = c10::impl::TorchDispatchModeTLS;
using Mode = std::shared_ptr<c10::impl::PyObject_TorchDispatchMode>;
thread_local Mode hidden;  // the mode; null where it is on the stack

// Takes modes of programs off the stack, the innermost first.
std::vector<Mode> take_all() {
  std::vector<Mode> found;
  while (Modes::any_modes_set(/*skip_infra_modes=*/true)) found.push_back(Modes::pop_stack());
  return found;
}

void put(std::vector<Mode> modes) {
  for (; !modes.empty(); modes.pop_back()) Modes::push_non_infra_mode_onto_stack(std::move(modes.back()));
}

// Hides the outermost mode, or puts it back there.
void hide(bool is_hidden) {
  if ((hidden != nullptr) == is_hidden) return;
  std::vector<Mode> modes = take_all();
  if (!is_hidden) {
    modes.push_back(std::move(hidden));
    hidden = nullptr;
  } else if (!modes.empty()) {
    hidden = std::move(modes.back());
    modes.pop_back();
  }
  put(std::move(modes));
}

// Puts a hidden mode back while it lives, if that is `wanted`. What is hidden or put back meanwhile ends with it.
class Shown {
 public:
  explicit Shown(bool wanted) : was_hidden_(hidden != nullptr) {
    if (wanted) hide(false);
  }
  ~Shown() { hide(was_hidden_); }
  Shown(const Shown&) = delete;
  Shown& operator=(const Shown&) = delete;

 private:
  bool was_hidden_;
};

// Whether modes are wanted by whoever runs: our own code excludes their keys.
bool are_modes_wanted() {
  return !c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::Python) &&
         !c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::PythonTLSSnapshot);
}

// Whether the node at which the backward pass is has a formula of PyTorch's own; others may run Python.
bool is_at_formula() {
  const torch::autograd::Node* node = torch::autograd::get_current_node().get();
  if (const auto* const copied = dynamic_cast<const torch::autograd::CopySlices*>(node)) node = copied->fn.get();
  constexpr std::string_view generated = "N5torch8autograd9generated";
  return node != nullptr && std::string_view(typeid(*node).name()).substr(0, generated.size()) == generated;
}

// Whether the step's mode may hide: it is the only one, and there are no classes that run ops themselves, whose own code
// may want to run without any mode.
bool may_hide(const State* now) {
  return now != nullptr && now->modes == 1 && !now->wraps && Modes::stack_len() + (hidden != nullptr) == 1 && are_modes_wanted();
}

std::unique_ptr<at::ObserverContext> node_begins(const at::RecordFunction&) {
  running.push_back({this_turn(), hidden != nullptr});
  hide(may_hide(state != nullptr ? state : state_of_gpu.load()) && is_at_formula());
  return nullptr;
}

// A formula may call other nodes by itself: those have no turn of their own, and end within that of the caller.
void node_ends(const at::RecordFunction&, at::ObserverContext*) {
  if (running.empty()) return;
  const auto [turn, was_hidden] = running.back();
  running.pop_back();
  hide(was_hidden);
  if (running.empty() || !(running.back().turn == turn)) ended = turn;
}

// Whether so many hold something, and its Python object, if it has one, is nobody's: that one lives, and holds it, as
// long as anybody in C++ does.
template <typename Impl>
bool is_held_by(const Impl& held, size_t uses, size_t holders) {
  const auto& slot = *held.pyobj_slot();
  if (uses == holders) return slot.load_pyobj() == nullptr;
  return uses == holders + 1 && slot.has_unique_reference();
}

bool is_ordinary(const at::Tensor& tensor) {
  return tensor.defined() && (tensor.is_cpu() || tensor.is_cuda()) && tensor.layout() == c10::kStrided &&
         tensor.has_storage() && (tensor.key_set() & at::kTensorSubclassLike).empty() && !tensor.is_nested() &&
         !tensor._is_zerotensor() && !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
}

// Whether autograd's engine adds the gradient that a node gave to one that waits for the same node, which nobody else
// has. Where nobody looks it writes the sum over that one. Where a mode is on it does not, nor where Python was shown the
// gradient's storage, whose Python object then counts as a holder.
//
// Formulas of nodes and hooks add gradients up as well, and may read both again. So the formula of the node that the
// engine is at has to be over, and there must be no hooks that come after it.
bool is_sum_of_gradients(const State& now, const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  static const auto add = c10::Dispatcher::singleton().findSchemaOrThrow("aten::add", "Tensor");
  if (!(op == add) || at::GradMode::is_enabled() || ended.node == nullptr || !(this_turn() == ended)) return false;
  if (!torch::autograd::get_current_node()->post_hooks().empty()) return false;
  const c10::IValue* const given = &stack[stack.size() - 3];
  if (!given[0].isTensor() || !given[1].isTensor() || !given[2].isInt() || given[2].toInt() != 1) return false;
  const at::Tensor &sum = given[0].toTensor(), &other = given[1].toTensor();
  if (!is_ordinary(sum) || !is_ordinary(other) || sum.is_same(other) || sum.sizes() != other.sizes() ||
      sum.scalar_type() != other.scalar_type() || !sum.is_non_overlapping_and_dense())
    return false;
  const auto is_free = [&] {
    const c10::Storage& storage = sum.storage();
    return is_held_by(*sum.unsafeGetTensorImpl(), sum.use_count(), 2) &&  // the engine and the stack
           is_held_by(*storage.unsafeGetStorageImpl(), storage.use_count(), 1);
  };
  if (is_free()) return true;
  if (now.let_go_of == nullptr) return false;
  const void* const storage = sum.storage().unsafeGetStorageImpl();
  {
    const std::lock_guard guard(looking);
    if (!parked.count(storage) && !followed.count(storage)) return false;
  }
  now.let_go_of(storage);
  return is_free();  // should it be away all the same: `add_` is the mode's then, which has it come back
}

void add_in_place(torch::jit::Stack* stack) {
  static const auto add_ = c10::Dispatcher::singleton().findSchemaOrThrow("aten::add_", "Tensor");
  add_.callBoxed(stack);
}

// --- the ops of a step ---

// What the CPU's generator draws next, to be drawn once more.
class Dice {
 public:
  Dice() : generator_(at::detail::getDefaultCPUGenerator()) {
    const std::lock_guard guard(generator_.mutex());
    auto& now = *at::check_generator<at::CPUGeneratorImpl>(generator_);
    engine_ = now.engine();
    next_float_ = now.next_float_normal_sample();
    next_double_ = now.next_double_normal_sample();
  }
  void put_back() {
    const std::lock_guard guard(generator_.mutex());
    auto& now = *at::check_generator<at::CPUGeneratorImpl>(generator_);
    now.set_engine(engine_);
    now.set_next_float_normal_sample(next_float_);
    now.set_next_double_normal_sample(next_double_);
  }

 private:
  at::Generator generator_;
  at::mt19937 engine_;
  std::optional<float> next_float_;
  std::optional<double> next_double_;
};

// Whether an op writes to tensors in turn: where it fails, half of them may be done.
bool writes_to_list(const c10::OperatorHandle& op) {
  const auto& arguments = op.schema().arguments();
  return std::any_of(arguments.begin(), arguments.end(), [](const c10::Argument& argument) {
    return argument.alias_info() != nullptr && argument.alias_info()->isWrite() &&
           argument.type()->kind() == c10::TypeKind::ListType;
  });
}

// Run an op past the mode. False where memory ran out: its arguments are on the stack as they were, and the generator,
// if it draws, is too.
bool passes(State& now, const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack,
            size_t count, bool draws) {
  const std::vector<c10::IValue> given(stack->end() - count, stack->end());
  const size_t below = stack->size() - count;
  std::optional<Dice> dice;
  if (draws) dice.emplace();
  try {
    const Passing passing(now);
    op.redispatchBoxed(keys - kModes, stack);
    return true;
  } catch (const c10::Error& error) {
    if (writes_to_list(op) || !is_out_of_memory(error.what_without_backtrace())) throw;
  } catch (const std::bad_alloc&) {
    if (writes_to_list(op)) throw;
  } catch (const std::runtime_error& error) {
    if (writes_to_list(op) || !is_out_of_memory(error.what())) throw;
  }
  if (dice) dice->put_back();
  stack->resize(below);
  stack->insert(stack->end(), given.begin(), given.end());
  return false;
}

// An op of the step that is learned has run: if none of those that it came apart into needs care, it may pass. What was
// learned of a larger one `says_more`, and stays.
void learn(State& now, const c10::OperatorHandle& op, int64_t first, uint64_t look, const std::vector<int64_t>& sizes,
           bool says_more) {
  const int64_t ops = now.number - first;
  if (now.number > now.length || op.operator_name().name.rfind("aten::", 0) != 0) return;
  int64_t rise = 0, flags = 0;
  for (int64_t i = first; i < now.number; ++i) {
    if (now.needs[i] < 0) return;
    flags |= now.needs[i] & ~kBytes;
    rise += now.needs[i] & kBytes;
  }
  const bool writes = flags & kWrites;
  if (writes && ops > 1) return;
  uint64_t written = 0;
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    // Batch norm does not say that it updates its running statistics.
    const bool is_updated = writes && arguments[i].name().rfind("running_", 0) == 0;
    const bool is_written = arguments[i].alias_info() != nullptr && arguments[i].alias_info()->isWrite();
    if (!is_written && !is_updated) continue;
    if (i >= 64 || !writes) return;
    written |= uint64_t{1} << i;
  }
  Expected& known = now.expected[ops > 1 ? now.length + first : first];
  const auto bounds = static_cast<int64_t>(sizes.size());
  int64_t first_bound = known.first_bound;
  if (now.loose) {
    if (says_more && known.op == &op.schema() && known.look == look && known.ops == ops) {
      known.rise = std::max(known.rise, rise);
      known.flags |= flags;
      return;
    }
    if (known.bounds != bounds) {
      first_bound = static_cast<int64_t>(now.bounds->size());
      now.bounds->resize(now.bounds->size() + sizes.size());
    }
    std::copy(sizes.begin(), sizes.end(), now.bounds->begin() + first_bound);
  }
  known = Expected{&op.schema(), look, ops, rise, flags, written, first_bound, now.loose ? bounds : 0};
}

bool is_followed(const c10::IValue& item) {
  return !item.isTensor() || followed.count(item.toTensor().storage().unsafeGetStorageImpl());
}

// Whether an op writes to nothing that anybody follows.
bool writes_safely(const Expected& next, const torch::jit::Stack& stack, size_t count) {
  if (next.written == 0) return true;
  const std::lock_guard guard(looking);
  for (size_t i = 0; i < count; ++i) {
    if ((next.written >> i & 1) == 0) continue;
    const c10::IValue& item = stack[stack.size() - count + i];
    if (item.isNone()) continue;
    if (item.isList() ? std::any_of(item.toListRef().begin(), item.toListRef().end(), is_followed) : is_followed(item))
      return false;
  }
  return true;
}

bool is_parked(const c10::IValue& item) {
  return item.isTensor() && item.toTensor().has_storage() &&
         parked.count(item.toTensor().storage().unsafeGetStorageImpl());
}

// Whether nothing that an op is given is parked.
bool all_there(const torch::jit::Stack& stack, size_t count) {
  const std::lock_guard guard(looking);
  if (parked.empty()) return true;
  for (size_t i = stack.size() - count; i < stack.size(); ++i) {
    if (is_parked(stack[i])) return false;
    if (!stack[i].isList()) continue;
    for (const c10::IValue& inner : stack[i].toListRef())
      if (is_parked(inner)) return false;
  }
  return true;
}

// Whether what a tensor lies in is among the live bytes.
bool is_known(const State& now, const c10::IValue& item) {
  if (!item.isTensor() || !item.toTensor().has_storage()) return true;
  const c10::Storage& storage = item.toTensor().storage();
  return storage.nbytes() < kLeastBlock || now.counts(now.count, const_cast<void*>(storage.data())) ||
         now.books->count(storage.unsafeGetStorageImpl());
}

// Whether all that an op is given is. A batch from outside of the step is not before the ledger was shown it.
bool all_known(const State& now, const torch::jit::Stack& stack, size_t count) {
  if (now.count == nullptr) return true;  // an allocator says what it has given out
  const std::lock_guard guard(looking);
  for (size_t i = stack.size() - count; i < stack.size(); ++i) {
    if (!is_known(now, stack[i])) return false;
    if (!stack[i].isList()) continue;
    for (const c10::IValue& inner : stack[i].toListRef())
      if (!is_known(now, inner)) return false;
  }
  return true;
}

// Whether the program is on the stream that the step began on: what it does on others somebody has to order.
bool is_at_home(const State& now) {
  if (now.device < 0) return true;
  static const c10::impl::VirtualGuardImpl gpu(c10::kCUDA);
  return gpu.getStream({c10::kCUDA, static_cast<c10::DeviceIndex>(now.device)}).id() == now.stream;
}

bool fits(State& now, const Expected& next) {
  int64_t live = 0;
  if (now.device < 0) {
    live = *now.booked + now.count->bytes;
  } else {
    const auto stats = stats_of(now.device);
    live = stats.allocated_bytes[kAll].current;
    if (now.open && stats.reserved_bytes[kAll].current >= now.open) {  // Python puts the wall back
      now.open = 0;
      return false;
    }
  }
  const int64_t risen = live + next.rise;
  if (risen > now.budget || ((next.flags & kGated) && !now.open)) return false;
  if (now.device >= 0) {  // its own allocator keeps it under the wall, and the host's heap has no bounds
    now.peak = std::max(now.peak, risen);
    return true;
  }
  if (!heap_has_room()) return false;
  // What adds nothing need not wait for memory that is free by now to be let go.
  if (now.bell && risen > now.level + kLittle && next.rise >= kLittle) return false;
  if (next.rise >= kLargeRise) now.keep_under(now.limit, now.statm, now.page, 0);
  return true;
}

// What autograd asks on this thread when it saves a tensor.
const void* asked_hook() {
  const auto& hooks = at::SavedTensorDefaultHooks::get_tls_state().stack;
  return hooks.empty() ? nullptr : hooks.top().first.ptr(&hooks.top().first.pyinterpreter());
}

// Whether a tensor is of a class that runs ops itself.
bool is_wrapper(const c10::IValue& item) {
  return item.isTensor() && item.toTensor().key_set().has(c10::DispatchKey::Python);
}

// Whether a call is `detach`, which is no op of a step but where a gradient becomes a leaf's: `is_of_step` in ops.py. Not
// of a tensor whose class runs ops itself.
bool is_mere_detach(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  static const auto detach = c10::Dispatcher::singleton().findSchemaOrThrow("aten::detach", "");
  if (!(op == detach) || is_wrapper(stack.back())) return false;
  return dynamic_cast<torch::autograd::AccumulateGrad*>(torch::autograd::get_current_node().get()) == nullptr;
}

bool is_given_wrapper(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  return std::any_of(stack.end() - static_cast<int64_t>(op.schema().arguments().size()), stack.end(), [](const auto& item) {
    return is_wrapper(item) || (item.isList() && std::any_of(item.toListRef().begin(), item.toListRef().end(), is_wrapper));
  });
}

// Whether a call of an op of PyTorch's own does no more than to call others: such a kernel is taken where there is none
// of the device, whatever autograd has for other devices.
bool comes_apart(const c10::OperatorHandle& op, c10::DispatchKeySet keys) {
  using Key = c10::DispatchKey;
  const bool on_gpu = keys.has(Key::AutogradCUDA);
  for (const Key key : {on_gpu ? Key::AutogradCUDA : Key::AutogradCPU, on_gpu ? Key::CUDA : Key::CPU,
                        Key::CompositeExplicitAutograd, Key::CompositeExplicitAutogradNonFunctional})
    if (op.hasKernelForDispatchKey(key)) return false;
  return keys.has_any(c10::autograd_dispatch_keyset) && op.hasKernelForDispatchKey(Key::CompositeImplicitAutograd) &&
         op.operator_name().name.rfind("aten::", 0) == 0;
}

// Run an op for the mode to see. One that comes apart does so as if there were no mode, which sees its parts.
void show(const State& now, const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  if (may_hide(&now) && comes_apart(op, keys)) hide(true);  // until the call of `watch` is over
  op.redispatchBoxed(keys, stack);
}

void watch(const c10::OperatorHandle& op, c10::DispatchKeySet all, torch::jit::Stack* stack) {
  const bool is_shown = hidden != nullptr && are_modes_wanted();
  if (is_shown) all = all | kModes;
  const Shown shown(is_shown);
  const c10::DispatchKeySet keys = all & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey);
  State* const now = state != nullptr ? state : state_of_gpu.load();
  if (now != nullptr && !now->wraps) now->wraps = is_given_wrapper(op, *stack);
  // The modes' key is not there where the mode itself calls an op, nor inside an op.
  if (now == nullptr || !all.has(c10::DispatchKey::Python) || all.has_any(kInsideVmap) ||
      c10::impl::TorchDispatchModeTLS::stack_len() != now->modes) {
    op.redispatchBoxed(keys, stack);
    return;
  }
  if (is_sum_of_gradients(*now, op, *stack)) {
    add_in_place(stack);
    return;
  }
  if (now->passes && is_mere_detach(op, *stack)) {
    const c10::impl::ExcludeDispatchKeyGuard modes_off(kModes);
    op.redispatchBoxed(keys - kModes, stack);
    return;
  }
  if (asked_hook() != now->hooks) {  // the program's own may keep the address of what an op saves
    show(*now, op, keys, stack);
    return;
  }
  if (!(now->learns || now->passes) || now->number >= now->length) {
    show(*now, op, keys, stack);
    return;
  }
  const size_t count = op.schema().arguments().size();
  const int64_t first = now->number;
  const bool is_one = now->expected[first].op == &op.schema();
  // A copy: the step may turn to another plan meanwhile.
  const Expected next = now->expected[is_one ? first : now->length + first];
  const bool is_op = next.op == &op.schema();
  const uint64_t look = now->learns || is_op ? look_of(*now, keys, *stack, count) : 0;
  const bool is_expected = is_op && look != 0 && next.look == look && is_within(*now, next, *stack, count);
  if (now->passes && is_expected && is_at_home(*now) && may_go_unseen(*now, first, next.ops) && all_there(*stack, count) &&
      all_known(*now, *stack, count) && writes_safely(next, *stack, count) && fits(*now, next) &&
      passes(*now, op, keys, stack, count, next.flags & kDraws)) {
    now->number += next.ops;
    now->passed += next.ops;
    return;
  }
  if (!now->learns) {
    show(*now, op, keys, stack);
    return;
  }
  std::vector<int64_t> sizes;
  // Of what nobody here knows no sizes either: a nested tensor has none that it could be asked for.
  if (now->loose && look != 0) see_sizes(*stack, count, [&](int64_t size, bool) { sizes.push_back(size); });
  const Expected* const lesson = now->expected;
  show(*now, op, keys, stack);
  if (look != 0 && now->learns && now->expected == lesson && now->number > first)
    learn(*now, op, first, look, sizes, is_expected);
}

torch::Library* library = nullptr;

}  // namespace

extern "C" {

// See all ops from now on that are called where `outgrow_fastpath_enter` was, and in backward passes asked for there.
// Once in a process.
void outgrow_fastpath_install() {
  library = new torch::Library(torch::Library::IMPL, "_", kKey, __FILE__, __LINE__);
  library->fallback(torch::CppFunction::makeFromBoxedFunction<&watch>());
}

// Ops on this thread are the step's from now on. 0 if they cannot be seen here: another step on a GPU is under way.
int outgrow_fastpath_enter(State* now) {
  State* nobody = nullptr;
  if (now->device >= 0 && !state_of_gpu.compare_exchange_strong(nobody, now)) return 0;
  if (now->device < 0) state = now;
  c10::impl::tls_set_dispatch_key_included(kKey, true);
  return 1;
}

// They are no longer.
void outgrow_fastpath_leave(State* now) {
  if (State* own = now; now->device >= 0) state_of_gpu.compare_exchange_strong(own, nullptr);
  state = nullptr;
  c10::impl::tls_set_dispatch_key_included(kKey, false);
}

// See nodes of backward passes that are asked for on this thread from now on, or no longer. Not inside one: what is
// switched on or off there is undone when it ends.
void outgrow_fastpath_see_nodes(int is_on) {
  if (torch::autograd::get_current_graph_task_id() != -1) return;
  if (is_on && on_nodes == at::INVALID_CALLBACK_HANDLE) {
    try {
      on_nodes = at::addThreadLocalCallback(
          at::RecordFunctionCallback(&node_begins, &node_ends).scopes({at::RecordScope::BACKWARD_FUNCTION}));
    } catch (const std::bad_alloc&) {  // sums are out of place then
    }
  } else if (!is_on && on_nodes != at::INVALID_CALLBACK_HANDLE) {
    at::removeCallback(on_nodes);
    on_nodes = at::INVALID_CALLBACK_HANDLE;
    ended = {};
  }
}

// Hide the step's mode on this thread, or put it back; whether it was hidden before.
int outgrow_fastpath_hide(int is_hidden) {
  const bool was_hidden = hidden != nullptr;
  hide(is_hidden);
  return was_hidden;
}

// Bytes that PyTorch's allocator has given out on a GPU, and that it holds.
int64_t outgrow_fastpath_allocated(int device) { return allocated_bytes(device); }
int64_t outgrow_fastpath_reserved(int device) { return stats_of(device).reserved_bytes[kAll].current; }

// Somebody has to know of each write to this storage from now on, or nobody has to any more.
void outgrow_fastpath_followed(const void* storage, int is_followed) { note(followed, storage, is_followed); }

// The bytes of this storage are not to be looked at from now on, or are again.
void outgrow_fastpath_parked(const void* storage, int is_parked) { note(parked, storage, is_parked); }

// The sizes of a lesson that goes on and on.
std::vector<int64_t>* outgrow_fastpath_new_bounds() { return new std::vector<int64_t>; }
void outgrow_fastpath_end_bounds(std::vector<int64_t>* bounds) { delete bounds; }

// What a ledger counts itself, to be told of each storage that it begins or ends to count.
Storages* outgrow_fastpath_new_books() { return new Storages; }
void outgrow_fastpath_booked(Storages* books, const void* storage, int is_booked) { note(*books, storage, is_booked); }
void outgrow_fastpath_end_books(Storages* books) {
  const std::lock_guard guard(looking);
  delete books;
}

// Whether a storage may be resized, once more if it was only said that it may not: `numpy()` says so for good, however
// soon the array goes.
int outgrow_fastpath_make_resizable(c10::StorageImpl* storage) {
  if (storage->resizable()) return 1;
  const at::Allocator* const maker = storage->allocator();
  if (maker == nullptr || storage->data_ptr().get_deleter() != maker->raw_deleter()) return 0;
  storage->set_resizable(true);
  return 1;
}

// Whether the bytes of a storage are not to be looked at.
int outgrow_fastpath_is_parked(const void* storage) {
  const std::lock_guard guard(looking);
  return parked.count(storage) != 0;
}
}
