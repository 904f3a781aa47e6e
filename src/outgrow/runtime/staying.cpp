// Saved tensors that stay where they are, packed and unpacked without Python; staying.py says which, and why. Further
// ones on values that leave and come back; and the windows on the memory of all that do.
//
// `pack` and `unpack` of a `Stays` are the hooks of a session's steps. Whatever is not exactly what the plan foretells,
// and what the plan acts at, goes to the hooks in Python.

#include <torch/csrc/python_headers.h>

#include <structmember.h>

#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils.h>
#include <torch/csrc/utils/object_ptr.h>

#include <cstdint>
#include <new>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace {

constexpr int64_t kPacksPerLook = 8;  // as in hooks.py

const c10::DispatchKeySet kModes({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot});

// Tensors around tensors, which look like ordinary ones to Python.
const c10::DispatchKeySet kWrapped({c10::DispatchKey::Batched, c10::DispatchKey::FuncTorchBatched,
                                    c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::Functionalize});

// What is known of a saved tensor beforehand; as in staying.py.
struct Expected {
  int64_t role;
  int64_t nbytes;   // of the tensor; -1 if that may be anything, and from -2 down if it may be less than -2 - nbytes
  int64_t counted;  // of its value, if this is the first tensor on it that is saved
  int64_t storage;  // where training state lies, once it was seen there; else 0
  int64_t value;    // of one that moves, the value that it is a window on, if others are as well; else -1
};
enum Role : int64_t { kMoves, kStays, kIsState };

// A place in a list that goes in a circle.
struct Node {
  Node* before = this;
  Node* after = this;

  void put_before(Node& other) {
    before = other.before, after = &other;
    before->after = other.before = this;
  }
  void take_out() {
    before->after = after, after->before = before;
    before = after = this;
  }
};

// One that stays.
struct Stay {
  PyObject_HEAD
  Node node;         // among those that somebody may have to be shown; alone, if it is the tensor itself
  at::Tensor alias;  // shares memory and version counter with what was saved
  PyObject* own;     // of what no node made, in training state, the tensor itself in place of that
  PyObject* handle;  // what took its place when the pool was shown it
  int64_t epoch, number, nbytes, version;
  bool is_state;     // training state, or a view of it

  const at::Tensor& tensor() const { return own != nullptr ? THPVariable_Unpack(own) : alias; }
  static Stay* of(Node* node) { return reinterpret_cast<Stay*>(reinterpret_cast<char*>(node) - offsetof(Stay, node)); }
};

// A further one on a value that moves, of which the pool has an entry already.
struct Share {
  PyObject_HEAD
  PyObject* anchor;  // the handle of another one, by which the entry is held; null once a handle has taken its place
  PyObject* handle;
  c10::VariableVersion counter;  // of what was saved
  std::vector<int64_t> sizes, strides;
  int64_t offset;
  at::ScalarType dtype;
  int64_t epoch, number, nbytes, version;
};

// For each value that was saved as more than one tensor, a weak reference to the handle of one.
using Anchors = std::unordered_map<int64_t, PyObject*>;

// The hooks of a session, and where the step that runs has come to in its plan.
struct Stays {
  PyObject_HEAD
  PyObject* pack;          // the hooks in Python
  PyObject* unpack;
  PyObject* see;           // shows the ledger a tensor
  PyObject* is_compiling;  // whether a compiler looks at Python's frames
  PyObject* strays;        // whether the program computes where copies are not ordered; None where it cannot
  PyObject* look;          // has a look at the resident set
  PyObject* recent;        // the values that the pool has in memory, the last used last
  PyObject* packs;         // a list: bytes of each saved tensor of the step
  Py_buffer expected;      // of each saved tensor, by its number
  Py_buffer codes;         // of each tick: the number of its saved tensor, whether the plan acts, whether it is an unpack
  int64_t number;          // of the next saved tensor of the step
  int64_t tick;            // the next one
  int64_t epoch;           // the step
  int64_t kept_bytes;      // of the values of this step that stay, and could leave
  int64_t on;              // whether the step goes by a plan
  int64_t waits;           // whether something waits for the next tick
  int64_t lends;           // whether training state may be away in this step
  int64_t looks;           // whether the resident set is looked at here, as ops are not watched
  int64_t counts_all;      // whether an allocator says what it has given out
  int64_t count, counts;   // else addresses of what counts blocks from when they are made, and of what asks it
  int64_t is_parked;       // address of what tells whether a storage's bytes may be away
  int64_t thread;          // that the training is on, if it may change; else -1
  Node here;
  Anchors anchors;
};

// --- one of them ---

void Stay_dealloc(PyObject* item) {
  auto* const self = reinterpret_cast<Stay*>(item);
  self->node.take_out();
  self->alias.~Tensor();
  Py_XDECREF(self->own);
  PyObject* const handle = self->handle;
  Py_TYPE(item)->tp_free(item);
  Py_XDECREF(handle);
}

PyObject* Stay_tensor(PyObject* item, void*) {
  HANDLE_TH_ERRORS
  auto* const self = reinterpret_cast<Stay*>(item);
  if (self->handle != nullptr) Py_RETURN_NONE;
  return self->own != nullptr ? Py_NewRef(self->own) : THPVariable_Wrap(self->alias);
  END_HANDLE_TH_ERRORS
}

// A handle takes its place.
PyObject* Stay_give_way(PyObject* item, PyObject* handle) {
  HANDLE_TH_ERRORS
  auto* const self = reinterpret_cast<Stay*>(item);
  Py_XSETREF(self->handle, Py_NewRef(handle));
  self->node.take_out();
  self->alias.reset();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyMemberDef stay_members[] = {{"handle", T_OBJECT, offsetof(Stay, handle), READONLY, nullptr},
                              {"epoch", T_LONGLONG, offsetof(Stay, epoch), READONLY, nullptr},
                              {"number", T_LONGLONG, offsetof(Stay, number), READONLY, nullptr},
                              {"nbytes", T_LONGLONG, offsetof(Stay, nbytes), READONLY, nullptr},
                              {"version", T_LONGLONG, offsetof(Stay, version), READONLY, nullptr},
                              {nullptr, 0, 0, 0, nullptr}};
PyGetSetDef stay_properties[] = {{"tensor", Stay_tensor, nullptr, nullptr, nullptr},
                                 {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyMethodDef stay_methods[] = {{"give_way", Stay_give_way, METH_O, nullptr}, {nullptr, nullptr, 0, nullptr}};

PyTypeObject StayType = {PyVarObject_HEAD_INIT(nullptr, 0)};

// --- one that shares a value ---

void Share_dealloc(PyObject* item) {
  auto* const self = reinterpret_cast<Share*>(item);
  using Sizes = std::vector<int64_t>;
  self->counter.~VariableVersion();
  self->sizes.~Sizes();
  self->strides.~Sizes();
  PyObject *const anchor = self->anchor, *const handle = self->handle;
  Py_TYPE(item)->tp_free(item);
  Py_XDECREF(anchor);
  Py_XDECREF(handle);
}

PyObject* tuple_of(const std::vector<int64_t>& numbers) {
  PyObject* const found = PyTuple_New(static_cast<Py_ssize_t>(numbers.size()));
  for (size_t i = 0; found != nullptr && i < numbers.size(); ++i)
    PyTuple_SET_ITEM(found, static_cast<Py_ssize_t>(i), PyLong_FromLongLong(numbers[i]));
  return found;
}

// (dtype, offset, shape, strides) of the window that it is.
PyObject* Share_geometry(PyObject* item, void*) {
  HANDLE_TH_ERRORS
  auto* const self = reinterpret_cast<Share*>(item);
  THPObjectPtr shape(tuple_of(self->sizes)), strides(tuple_of(self->strides));
  if (!shape || !strides) return nullptr;
  return Py_BuildValue("OLOO", reinterpret_cast<PyObject*>(torch::getTHPDtype(self->dtype)),
                       static_cast<long long>(self->offset), shape.get(), strides.get());
  END_HANDLE_TH_ERRORS
}

// Another tensor on the memory of this one, with the version counter of what was saved.
PyObject* Share_ghost(PyObject* item, PyObject* given) {
  HANDLE_TH_ERRORS
  const c10::impl::ExcludeDispatchKeyGuard modes_off(kModes);
  const auto* const self = reinterpret_cast<Share*>(item);
  return THPVariable_Wrap(at::Tensor(THPVariable_Unpack(given).unsafeGetTensorImpl()->shallow_copy_and_detach(
      self->counter, /*allow_tensor_metadata_change=*/true)));
  END_HANDLE_TH_ERRORS
}

// A handle takes its place.
PyObject* Share_give_way(PyObject* item, PyObject* handle) {
  auto* const self = reinterpret_cast<Share*>(item);
  Py_XSETREF(self->handle, Py_NewRef(handle));
  Py_CLEAR(self->anchor);
  Py_RETURN_NONE;
}

PyMemberDef share_members[] = {{"anchor", T_OBJECT, offsetof(Share, anchor), READONLY, nullptr},
                               {"handle", T_OBJECT, offsetof(Share, handle), READONLY, nullptr},
                               {"epoch", T_LONGLONG, offsetof(Share, epoch), READONLY, nullptr},
                               {"number", T_LONGLONG, offsetof(Share, number), READONLY, nullptr},
                               {"nbytes", T_LONGLONG, offsetof(Share, nbytes), READONLY, nullptr},
                               {"version", T_LONGLONG, offsetof(Share, version), READONLY, nullptr},
                               {nullptr, 0, 0, 0, nullptr}};
PyGetSetDef share_properties[] = {{"geometry", Share_geometry, nullptr, nullptr, nullptr},
                                  {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyMethodDef share_methods[] = {{"ghost", Share_ghost, METH_O, nullptr},
                               {"give_way", Share_give_way, METH_O, nullptr},
                               {nullptr, nullptr, 0, nullptr}};

PyTypeObject ShareType = {PyVarObject_HEAD_INIT(nullptr, 0)};

// --- all of them ---

// Neither modes nor functions over tensors look at what is done meanwhile.
class Unseen {
 public:
  Unseen() : modes_off_(kModes), functions_(at::impl::PythonTorchFunctionTLS::get_disabled_state()) {
    at::impl::PythonTorchFunctionTLS::set_disabled_state(at::impl::TorchFunctionDisabledState::ALL_DISABLED);
  }
  ~Unseen() { at::impl::PythonTorchFunctionTLS::set_disabled_state(functions_); }
  Unseen(const Unseen&) = delete;
  Unseen& operator=(const Unseen&) = delete;

 private:
  c10::impl::ExcludeDispatchKeyGuard modes_off_;
  at::impl::TorchFunctionDisabledState functions_;
};

// What autograd is given back. It makes another tensor of that, below its dispatcher, and would ask a mode in Python to
// do so.
class Returned final : public c10::TensorImpl {
 public:
  using c10::TensorImpl::TensorImpl;

  c10::intrusive_ptr<c10::TensorImpl> shallow_copy_and_detach(const c10::VariableVersion& version_counter,
                                                              bool allow_tensor_metadata_change) const override {
    const c10::impl::ExcludeDispatchKeyGuard modes_off(kModes);
    return TensorImpl::shallow_copy_and_detach(version_counter, allow_tensor_metadata_change);
  }
  c10::intrusive_ptr<c10::TensorImpl> shallow_copy_and_detach(c10::VariableVersion&& version_counter,
                                                              bool allow_tensor_metadata_change) const override {
    const c10::impl::ExcludeDispatchKeyGuard modes_off(kModes);
    return TensorImpl::shallow_copy_and_detach(std::move(version_counter), allow_tensor_metadata_change);
  }

  // On the memory of a tensor, with its version counter.
  static at::Tensor alias_of(const at::Tensor& tensor) {
    const c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
    auto made = c10::make_intrusive<Returned>(impl->key_set(), impl->dtype(), impl->device());
    copy_tensor_metadata(impl, made.get(), impl->version_counter(), /*allow_tensor_metadata_change=*/true);
    return at::Tensor(std::move(made));
  }
};

// Another tensor on the same memory, with the same version counter.
at::Tensor alias_of(const at::Tensor& tensor) {
  const c10::impl::ExcludeDispatchKeyGuard modes_off(kModes);
  const c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  return at::Tensor(impl->shallow_copy_and_detach(impl->version_counter(), /*allow_tensor_metadata_change=*/true));
}

bool is_plain(const at::Tensor& tensor) {
  return (tensor.is_cpu() || tensor.is_cuda()) && tensor.layout() == c10::kStrided && tensor.has_storage() &&
         !tensor.key_set().has_any(kWrapped) && !tensor.is_nested() && !tensor.is_conj() && !tensor.is_neg() &&
         !tensor.is_quantized() && !tensor.is_inference() && !tensor._is_zerotensor() &&
         !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
}

bool is_parked(const Stays& self, const c10::StorageImpl* storage) {
  const auto ask = reinterpret_cast<int (*)(const void*)>(self.is_parked);
  return ask != nullptr && ask(storage);
}

// Whether the bytes of a tensor's storage are counted without the ledger.
bool is_counted(const Stays& self, const at::Tensor& tensor) {
  if (self.counts_all) return true;
  const auto ask = reinterpret_cast<int (*)(int64_t, const void*)>(self.counts);
  return ask != nullptr && ask(self.count, tensor.storage().data());
}

bool is_true(PyObject* answer) {
  const bool found = answer != nullptr && answer != Py_None && answer != Py_False;
  Py_XDECREF(answer);
  return found;
}

bool is_next(const Stays& self, int64_t code) {
  return self.on && !self.waits && self.tick < static_cast<int64_t>(self.codes.len / sizeof(int64_t)) &&
         static_cast<const int64_t*>(self.codes.buf)[self.tick] == code;
}

// Whether the program computes where copies are not ordered; or with its error set.
bool has_strayed(const Stays& self) {
  return self.strays != Py_None && (is_true(PyObject_CallNoArgs(self.strays)) || PyErr_Occurred());
}

// What is known of a saved tensor, if it is the one that comes next; null if Python has to say, or with its error set.
const Expected* next_of(Stays& self, PyObject* item) {
  if (!THPVariable_CheckExact(item) || !is_next(self, self.number << 2)) return nullptr;
  // What is called here in Python would be compiled.
  if (is_true(PyObject_CallNoArgs(self.is_compiling)) || PyErr_Occurred()) return nullptr;
  const auto& next = static_cast<const Expected*>(self.expected.buf)[self.number];
  const at::Tensor& tensor = THPVariable_Unpack(item);
  if ((next.role == kMoves && next.value < 0) || !is_plain(tensor)) return nullptr;
  const auto nbytes = static_cast<int64_t>(tensor.nbytes());
  if (next.nbytes >= 0 ? nbytes != next.nbytes : next.nbytes < -1 && nbytes > -2 - next.nbytes) return nullptr;
  return has_strayed(self) ? nullptr : &next;
}

// What autograd is to keep of one that stays; null as above.
Stay* stay_for(Stays& self, PyObject* item, const Expected& next) {
  const at::Tensor& tensor = THPVariable_Unpack(item);
  const bool is_state = next.role == kIsState;
  if (is_state) {
    // Who lends parameters counts aliases of theirs.
    if (reinterpret_cast<int64_t>(tensor.storage().unsafeGetStorageImpl()) != next.storage ||
        (self.lends && !tensor.is_leaf()))
      return nullptr;
  } else if (tensor.is_leaf() && tensor.requires_grad()) {  // the program may exchange its memory
    return nullptr;
  } else if (!is_counted(self, tensor)) {
    const Unseen unseen;
    PyObject* const record = PyObject_CallOneArg(self.see, item);
    if (record == nullptr) return nullptr;
    Py_DECREF(record);
  }
  const bool is_itself = is_state && tensor.is_leaf();
  at::Tensor alias = is_itself ? at::Tensor() : alias_of(tensor);
  PyObject* const made = StayType.tp_alloc(&StayType, 0);
  if (made == nullptr) return nullptr;
  auto* const stay = reinterpret_cast<Stay*>(made);
  new (&stay->node) Node;
  new (&stay->alias) at::Tensor(std::move(alias));
  if (is_itself) {
    stay->own = Py_NewRef(item);
  } else {
    stay->node.put_before(self.here);
  }
  stay->is_state = is_state;
  stay->epoch = self.epoch;
  stay->number = self.number;
  stay->nbytes = static_cast<int64_t>(tensor.nbytes());
  stay->version = tensor._version();
  if (next.counted > 0)
    self.kept_bytes += next.nbytes < 0 ? static_cast<int64_t>(tensor.storage().nbytes()) : next.counted;
  return stay;
}

// An attribute that is read time and again.
struct Attribute {
  PyObject* const name;
  explicit Attribute(const char* text) : name(PyUnicode_InternFromString(text)) {}
  THPObjectPtr of(PyObject* item) const { return THPObjectPtr(PyObject_GetAttr(item, name)); }
  bool is(PyObject* item, int64_t number) const {
    THPObjectPtr found = of(item);
    return found && PyLong_AsLongLong(found.get()) == number;
  }
  bool is_none(PyObject* item) const { return of(item).get() == Py_None; }
};

// The storage where the value of an entry lies; null if it is not there, or its bytes are still on their way.
c10::StorageImpl* storage_of(PyObject* entry) {
  static const Attribute storage("storage"), reading("reading");
  THPObjectPtr found = storage.of(entry);
  if (!found || !THPStorage_Check(found.get()) || !reading.is_none(entry)) return nullptr;
  return THPStorage_Unpack(found.get()).unsafeGetStorageImpl();  // the entry holds it
}

// The entry of a handle's value; null if it has none.
THPObjectPtr entry_of(PyObject* handle) {
  static const Attribute entry("entry");
  THPObjectPtr found = entry.of(handle);
  return found.get() == Py_None ? THPObjectPtr() : std::move(found);
}

// The handle that an anchor leads to, with a hold on it; null if it is gone.
PyObject* anchor_of(const Stays& self, int64_t value) {
  const auto found = self.anchors.find(value);
  if (found == self.anchors.end()) return nullptr;
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* handle = nullptr;
  PyWeakref_GetRef(found->second, &handle);
  return handle;
#else
  PyObject* const handle = PyWeakref_GetObject(found->second);
  return handle == nullptr || handle == Py_None ? nullptr : Py_NewRef(handle);
#endif
}

// What autograd is to keep of one more window on a value that lies where the pool knows it; null as above.
Share* share_for(Stays& self, PyObject* item, const Expected& next) {
  const at::Tensor& tensor = THPVariable_Unpack(item);
  if (tensor.is_leaf() && tensor.requires_grad()) return nullptr;
  THPObjectPtr anchor(anchor_of(self, next.value));
  THPObjectPtr entry = anchor ? entry_of(anchor) : THPObjectPtr();
  if (!entry || storage_of(entry) != tensor.storage().unsafeGetStorageImpl()) return nullptr;
  // Who makes values anew has to know of what was written to since it was saved last.
  static const Attribute is_changed("is_changed");
  if (!is_changed.is(entry, 0) || is_parked(self, tensor.storage().unsafeGetStorageImpl())) return nullptr;
  PyObject* const made = ShareType.tp_alloc(&ShareType, 0);
  if (made == nullptr) return nullptr;
  auto* const share = reinterpret_cast<Share*>(made);
  new (&share->counter) c10::VariableVersion(tensor.unsafeGetTensorImpl()->version_counter());
  new (&share->sizes) std::vector<int64_t>(tensor.sizes().vec());
  new (&share->strides) std::vector<int64_t>(tensor.strides().vec());
  share->anchor = anchor.release();
  share->offset = tensor.storage_offset();
  share->dtype = tensor.scalar_type();
  share->epoch = self.epoch;
  share->number = self.number;
  share->nbytes = static_cast<int64_t>(tensor.nbytes());
  share->version = static_cast<int64_t>(tensor._version());
  return share;
}

// Take down that a saved tensor has its place; false with an error set.
bool packed(Stays& self, int64_t nbytes) {
  THPObjectPtr taken(PyLong_FromLongLong(nbytes));
  if (!taken || PyList_Append(self.packs, taken) != 0) return false;
  const int64_t number = self.number++;
  ++self.tick;
  if (!self.looks || number % kPacksPerLook != 0) return true;
  THPObjectPtr done(PyObject_CallNoArgs(self.look));
  return static_cast<bool>(done);
}

PyObject* Stays_pack(PyObject* hooks, PyObject* item) {
  HANDLE_TH_ERRORS
  auto& self = *reinterpret_cast<Stays*>(hooks);
  const Expected* const next = next_of(self, item);
  THPObjectPtr kept;
  if (next != nullptr && next->role == kMoves) {
    kept = reinterpret_cast<PyObject*>(share_for(self, item, *next));
  } else if (next != nullptr) {
    kept = reinterpret_cast<PyObject*>(stay_for(self, item, *next));
  }
  if (!kept) return PyErr_Occurred() ? nullptr : PyObject_CallOneArg(self.pack, item);
  if (!packed(self, static_cast<int64_t>(THPVariable_Unpack(item).nbytes()))) return nullptr;
  return kept.release();
  END_HANDLE_TH_ERRORS
}

// A window on a storage that shares a version counter.
at::Tensor window_on(c10::Storage storage, at::ScalarType dtype, int64_t offset, at::IntArrayRef sizes,
                     at::IntArrayRef strides, const c10::VariableVersion& counter) {
  const c10::DispatchKeySet keys(storage.device_type() == c10::kCUDA ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU);
  at::Tensor made = at::detail::make_tensor<Returned>(std::move(storage), keys, c10::scalarTypeToTypeMeta(dtype));
  c10::TensorImpl* const impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(sizes, strides, offset);
  if (!made.is_inference()) impl->set_version_counter(counter);
  return made;
}

// A copy that brought back the value of an entry is over, if there was one; false if Python has to see to that.
bool has_arrived(PyObject* entry) {
  static const Attribute reading("reading"), done("done"), error("error");
  THPObjectPtr copy = reading.of(entry);
  if (!copy) return false;
  if (copy.get() == Py_None) return true;
  return done.of(copy).get() == Py_True && error.is_none(copy) && PyObject_SetAttr(entry, reading.name, Py_None) == 0;
}

// The storage where the value of an entry lies, which is used now, last of all that the pool has; null if Python has to
// say, or with its error set.
c10::StorageImpl* storage_in_use(Stays& self, PyObject* entry) {
  static const Attribute recipe("recipe"), move_to_end("move_to_end");
  // Where the training has changed threads Python has to know, before anything is let go of there.
  if (self.thread != -1 && self.thread != static_cast<int64_t>(PyThread_get_thread_ident())) return nullptr;
  if (!has_arrived(entry) || !recipe.is_none(entry) || has_strayed(self)) return nullptr;
  c10::StorageImpl* const storage = storage_of(entry);
  if (storage == nullptr || is_parked(self, storage)) return nullptr;
  THPObjectPtr touched(PyObject_CallMethodOneArg(self.recent, move_to_end.name, entry));
  if (!touched && PyErr_ExceptionMatches(PyExc_KeyError)) PyErr_Clear();
  return touched ? storage : nullptr;
}

// What autograd is given back of a share; null as above.
PyObject* unpacked(Stays& self, const Share& share) {
  if (share.epoch != self.epoch || !is_next(self, share.number << 2 | 1) ||
      static_cast<int64_t>(share.counter.current_version()) != share.version)
    return nullptr;
  THPObjectPtr entry = entry_of(share.anchor);
  c10::StorageImpl* const storage = entry ? storage_in_use(self, entry) : nullptr;
  if (storage == nullptr) return nullptr;
  ++self.tick;
  auto held = c10::Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage));
  return THPVariable_Wrap(
      window_on(std::move(held), share.dtype, share.offset, share.sizes, share.strides, share.counter));
}

// The same of a handle: `Handle.rebuild` in handles.py.
PyObject* unpacked(Stays& self, PyObject* handle) {
  static const Attribute epoch("epoch"), number("number"), ghost("ghost"), version("_version"), dtype("_dtype"),
      offset("_offset"), shape("_shape"), stride("_stride");
  THPObjectPtr entry = entry_of(handle);
  if (!entry || !epoch.is(handle, self.epoch)) return nullptr;
  THPObjectPtr place = number.of(handle), versioned = ghost.of(handle);
  if (!place || !versioned || !is_next(self, PyLong_AsLongLong(place) << 2 | 1)) return nullptr;
  const c10::VariableVersion& counter = THPVariable_Unpack(versioned).unsafeGetTensorImpl()->version_counter();
  if (!counter.enabled() || !version.is(handle, counter.current_version())) return nullptr;
  THPObjectPtr kind = dtype.of(handle), start = offset.of(handle), sizes = shape.of(handle),
                     strides = stride.of(handle);
  if (!kind || !start || !sizes || !strides) return nullptr;
  c10::StorageImpl* const storage = storage_in_use(self, entry);
  if (storage == nullptr) return nullptr;
  ++self.tick;
  auto held = c10::Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage));
  return THPVariable_Wrap(window_on(std::move(held), reinterpret_cast<const THPDtype*>(kind.get())->scalar_type,
                                    PyLong_AsLongLong(start), THPUtils_unpackLongs(sizes),
                                    THPUtils_unpackLongs(strides), counter));
}

// The same of one that stays.
PyObject* unpacked(Stays& self, const Stay& stay) {
  const at::Tensor& tensor = stay.tensor();
  if (stay.epoch != self.epoch || !is_next(self, stay.number << 2 | 1) ||
      static_cast<int64_t>(tensor._version()) != stay.version || !is_plain(tensor) ||
      is_parked(self, tensor.storage().unsafeGetStorageImpl()))
    return nullptr;
  ++self.tick;
  // Another one: the stay's own loses its memory should the pool be shown it while autograd has this in hand.
  return THPVariable_Wrap(Returned::alias_of(tensor));
}

PyObject* Stays_unpack(PyObject* hooks, PyObject* item) {
  HANDLE_TH_ERRORS
  auto& self = *reinterpret_cast<Stays*>(hooks);
  PyObject* found = nullptr;
  PyObject* handle = item;
  if (Py_TYPE(item) == &ShareType) {
    const auto& share = *reinterpret_cast<const Share*>(item);
    handle = share.handle;
    if (handle == nullptr) found = unpacked(self, share);
  } else if (Py_TYPE(item) == &StayType) {
    const auto& stay = *reinterpret_cast<const Stay*>(item);
    handle = stay.handle;
    if (handle == nullptr) found = unpacked(self, stay);
  }
  if (handle != nullptr && self.on) found = unpacked(self, handle);
  return found != nullptr || PyErr_Occurred() ? found : PyObject_CallOneArg(self.unpack, item);
  END_HANDLE_TH_ERRORS
}

// Some of those that somebody may have to be shown, the oldest first.
template <typename Is>
PyObject* list_of(Stays& self, Is is_wanted) {
  THPObjectPtr found(PyList_New(0));
  for (Node* node = self.here.after; found && node != &self.here; node = node->after) {
    Stay* const stay = Stay::of(node);
    if (is_wanted(*stay) && PyList_Append(found, reinterpret_cast<PyObject*>(stay)) != 0) return nullptr;
  }
  return found.release();
}

PyObject* Stays_all(PyObject* hooks, PyObject*) {
  return list_of(*reinterpret_cast<Stays*>(hooks), [](const Stay&) { return true; });
}

// The oldest of those that can be shown, on storages that come to so many bytes together, and whatever else lies in
// these: a storage can leave once nobody holds it.
PyObject* Stays_oldest(PyObject* hooks, PyObject* wanted) {
  auto& self = *reinterpret_cast<Stays*>(hooks);
  int64_t nbytes = PyLong_AsLongLong(wanted);
  if (PyErr_Occurred()) return nullptr;
  std::unordered_set<const c10::StorageImpl*> storages;
  for (Node* node = self.here.after; nbytes > 0 && node != &self.here; node = node->after) {
    const Stay& stay = *Stay::of(node);
    const c10::StorageImpl* const storage = stay.alias.storage().unsafeGetStorageImpl();
    const bool is_changed = static_cast<int64_t>(stay.alias._version()) != stay.version;
    if (stay.is_state || is_changed || is_parked(self, storage)) continue;
    if (storages.insert(storage).second) nbytes -= static_cast<int64_t>(storage->nbytes());
  }
  const auto lies_there = [&](const Stay& stay) {
    return storages.count(stay.alias.storage().unsafeGetStorageImpl()) != 0;
  };
  return list_of(self, lies_there);
}

// No value has an anchor any more.
void forget_anchors(Stays& self) {
  Anchors anchors;
  anchors.swap(self.anchors);
  for (const auto& anchor : anchors) Py_DECREF(anchor.second);
}

PyObject* Stays_forget_anchors(PyObject* hooks, PyObject*) {
  forget_anchors(*reinterpret_cast<Stays*>(hooks));
  Py_RETURN_NONE;
}

// A saved tensor's value has an entry, which its handle holds: further ones may share that.
PyObject* Stays_anchor(PyObject* hooks, PyObject* args) {
  auto& self = *reinterpret_cast<Stays*>(hooks);
  long long number;
  PyObject* handle;
  if (!PyArg_ParseTuple(args, "LO", &number, &handle)) return nullptr;
  const auto* const expected = static_cast<const Expected*>(self.expected.buf);
  if (!self.on || number >= static_cast<long long>(self.expected.len / sizeof(Expected)) || expected[number].value < 0)
    Py_RETURN_NONE;
  PyObject* const made = PyWeakref_NewRef(handle, nullptr);
  if (made == nullptr) return nullptr;
  Py_XSETREF(self.anchors[expected[number].value], made);
  Py_RETURN_NONE;
}

// Know nothing of any step.
void forget(Stays& self) {
  forget_anchors(self);
  PyBuffer_Release(&self.expected);
  PyBuffer_Release(&self.codes);
  self.expected = self.codes = Py_buffer{};
}

// What is known of the saved tensors and ticks of the step that begins, two arrays of 64-bit integers.
PyObject* Stays_expect(PyObject* hooks, PyObject* args) {
  auto& self = *reinterpret_cast<Stays*>(hooks);
  PyObject *expected, *codes;
  if (!PyArg_ParseTuple(args, "OO", &expected, &codes)) return nullptr;
  forget(self);
  if (PyObject_GetBuffer(expected, &self.expected, PyBUF_SIMPLE) != 0) return nullptr;
  if (PyObject_GetBuffer(codes, &self.codes, PyBUF_SIMPLE) != 0) {
    forget(self);
    return nullptr;
  }
  Py_RETURN_NONE;
}

// Who is called; nobody at first.
template <typename Act>
void for_each_callable(Stays& self, Act act) {
  for (PyObject** const item :
       {&self.pack, &self.unpack, &self.see, &self.is_compiling, &self.strays, &self.look, &self.recent, &self.packs})
    act(*item);
}

int Stays_clear(PyObject* hooks) {
  for_each_callable(*reinterpret_cast<Stays*>(hooks), [](PyObject*& item) { Py_XSETREF(item, Py_NewRef(Py_None)); });
  return 0;
}

PyObject* Stays_new(PyTypeObject* type, PyObject*, PyObject*) {
  PyObject* const made = type->tp_alloc(type, 0);
  if (made == nullptr) return nullptr;
  new (&reinterpret_cast<Stays*>(made)->here) Node;
  new (&reinterpret_cast<Stays*>(made)->anchors) Anchors;
  reinterpret_cast<Stays*>(made)->thread = -1;
  Stays_clear(made);
  return made;
}

int Stays_traverse(PyObject* hooks, visitproc visit, void* arg) {
  int found = 0;
  for_each_callable(*reinterpret_cast<Stays*>(hooks), [&](PyObject* item) {
    if (found == 0 && item != nullptr) found = visit(item, arg);
  });
  return found;
}

void Stays_dealloc(PyObject* hooks) {
  auto& self = *reinterpret_cast<Stays*>(hooks);
  PyObject_GC_UnTrack(hooks);
  while (self.here.after != &self.here) self.here.after->take_out();
  forget(self);
  self.anchors.~Anchors();
  for_each_callable(self, [](PyObject*& item) { Py_CLEAR(item); });
  Py_TYPE(hooks)->tp_free(hooks);
}

PyMemberDef stays_members[] = {{"pack_in_python", T_OBJECT_EX, offsetof(Stays, pack), 0, nullptr},
                               {"unpack_in_python", T_OBJECT_EX, offsetof(Stays, unpack), 0, nullptr},
                               {"see", T_OBJECT_EX, offsetof(Stays, see), 0, nullptr},
                               {"is_compiling", T_OBJECT_EX, offsetof(Stays, is_compiling), 0, nullptr},
                               {"strays", T_OBJECT_EX, offsetof(Stays, strays), 0, nullptr},
                               {"look", T_OBJECT_EX, offsetof(Stays, look), 0, nullptr},
                               {"recent", T_OBJECT_EX, offsetof(Stays, recent), 0, nullptr},
                               {"packs", T_OBJECT_EX, offsetof(Stays, packs), 0, nullptr},
                               {"number", T_LONGLONG, offsetof(Stays, number), 0, nullptr},
                               {"tick", T_LONGLONG, offsetof(Stays, tick), 0, nullptr},
                               {"epoch", T_LONGLONG, offsetof(Stays, epoch), 0, nullptr},
                               {"kept_bytes", T_LONGLONG, offsetof(Stays, kept_bytes), 0, nullptr},
                               {"on", T_LONGLONG, offsetof(Stays, on), 0, nullptr},
                               {"waits", T_LONGLONG, offsetof(Stays, waits), 0, nullptr},
                               {"lends", T_LONGLONG, offsetof(Stays, lends), 0, nullptr},
                               {"looks", T_LONGLONG, offsetof(Stays, looks), 0, nullptr},
                               {"counts_all", T_LONGLONG, offsetof(Stays, counts_all), 0, nullptr},
                               {"count", T_LONGLONG, offsetof(Stays, count), 0, nullptr},
                               {"counts", T_LONGLONG, offsetof(Stays, counts), 0, nullptr},
                               {"thread", T_LONGLONG, offsetof(Stays, thread), 0, nullptr},
                               {"is_parked", T_LONGLONG, offsetof(Stays, is_parked), 0, nullptr},
                               {nullptr, 0, 0, 0, nullptr}};
PyMethodDef stays_methods[] = {{"pack", Stays_pack, METH_O, nullptr},
                               {"unpack", Stays_unpack, METH_O, nullptr},
                               {"all", Stays_all, METH_NOARGS, nullptr},
                               {"oldest", Stays_oldest, METH_O, nullptr},
                               {"expect", Stays_expect, METH_VARARGS, nullptr},
                               {"anchor", Stays_anchor, METH_VARARGS, nullptr},
                               {"forget_anchors", Stays_forget_anchors, METH_NOARGS, nullptr},
                               {nullptr, nullptr, 0, nullptr}};

PyTypeObject StaysType = {PyVarObject_HEAD_INIT(nullptr, 0)};

// --- windows on memory that came back ---

// As `window` in handles.py: (tensor that has the version counter, storage, dtype, offset, shape, strides).
PyObject* window(PyObject*, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count != 6 || !THPVariable_Check(given[0]) || !THPStorage_Check(given[1]) || !THPDtype_Check(given[2])) {
    PyErr_SetString(PyExc_TypeError, "window(tensor, storage, dtype, offset, shape, strides)");
    return nullptr;
  }
  return THPVariable_Wrap(window_on(THPStorage_Unpack(given[1]), reinterpret_cast<const THPDtype*>(given[2])->scalar_type,
                                    PyLong_AsLongLong(given[3]), THPUtils_unpackLongs(given[4]),
                                    THPUtils_unpackLongs(given[5]),
                                    THPVariable_Unpack(given[0]).unsafeGetTensorImpl()->version_counter()));
  END_HANDLE_TH_ERRORS
}

// Another tensor on the memory of one, with the same version counter, that autograd may be given back; that one itself
// if it is no plain window on memory.
PyObject* returned(PyObject*, PyObject* item) {
  HANDLE_TH_ERRORS
  const bool is_ours = THPVariable_CheckExact(item) && is_plain(THPVariable_Unpack(item));
  return is_ours ? THPVariable_Wrap(Returned::alias_of(THPVariable_Unpack(item))) : Py_NewRef(item);
  END_HANDLE_TH_ERRORS
}

PyMethodDef functions[] = {{"returned", returned, METH_O, nullptr},
                           {"window", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(window)), METH_FASTCALL, nullptr},
                           {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "outgrow_staying", nullptr, -1, functions};

}  // namespace

PyMODINIT_FUNC PyInit_outgrow_staying() {
  StayType.tp_name = "outgrow_staying.Stay";
  StayType.tp_basicsize = sizeof(Stay);
  StayType.tp_flags = Py_TPFLAGS_DEFAULT;
  StayType.tp_dealloc = Stay_dealloc;
  StayType.tp_members = stay_members;
  StayType.tp_getset = stay_properties;
  StayType.tp_methods = stay_methods;
  ShareType.tp_name = "outgrow_staying.Share";
  ShareType.tp_basicsize = sizeof(Share);
  ShareType.tp_flags = Py_TPFLAGS_DEFAULT;
  ShareType.tp_dealloc = Share_dealloc;
  ShareType.tp_members = share_members;
  ShareType.tp_getset = share_properties;
  ShareType.tp_methods = share_methods;
  StaysType.tp_name = "outgrow_staying.Stays";
  StaysType.tp_basicsize = sizeof(Stays);
  StaysType.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC;
  StaysType.tp_new = Stays_new;
  StaysType.tp_dealloc = Stays_dealloc;
  StaysType.tp_traverse = Stays_traverse;
  StaysType.tp_clear = Stays_clear;
  StaysType.tp_members = stays_members;
  StaysType.tp_methods = stays_methods;
  PyObject* module = nullptr;
  if (PyType_Ready(&StayType) == 0 && PyType_Ready(&ShareType) == 0 && PyType_Ready(&StaysType) == 0)
    module = PyModule_Create(&definition);
  if (module == nullptr || PyModule_AddObjectRef(module, "Stay", reinterpret_cast<PyObject*>(&StayType)) != 0 ||
      PyModule_AddObjectRef(module, "Share", reinterpret_cast<PyObject*>(&ShareType)) != 0 ||
      PyModule_AddObjectRef(module, "Stays", reinterpret_cast<PyObject*>(&StaysType)) != 0) {
    Py_XDECREF(module);
    return nullptr;
  }
  return module;
}
