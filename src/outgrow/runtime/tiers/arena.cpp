// The memory of CPU tensors while a session is open: one region of addresses, cut by best fit, whose pages stay.
//
// glibc's heap cannot hold a budget and be fast as well. It asks for 96 bytes more than an aligned block has, so that a
// block never fits the hole of one like it, and gives free pages back all at once or not at all. This allocator knows
// which pages are there and which of them are free: an allocation goes where pages are, and where new ones would lift
// the resident set over its limit, just as many are moved there from free addresses, or go back, as are needed, those
// first that were free for longest. The pages that blocks lie in at their most in each step stay: to give those back
// between two such moments would hardly lower a peak.
//
// Small blocks, and all blocks while no session is open, are PyTorch's own allocator's.

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>

namespace {

constexpr size_t kPage = 4096;           // what a block's address and size are multiples of
constexpr size_t kGranule = 2 << 20;     // pages come and go by so many bytes: a huge page
constexpr size_t kLeastBlock = 64 << 10; // smaller ones leave no holes worth speaking of
constexpr size_t kGrowth = 16 << 20;     // addresses that are made usable at a time
constexpr size_t kMostMoved = 16 << 10;  // granules; each is a mapping of its own, of which a process has 65530
constexpr int kTries = 24;               // gaps that are looked at for one block

size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

// The bytes of some blocks, as they were asked for: of those that a thread made while it counted, large and small; and
// the most that they and `others` came to at once, since its owner set that last.
struct Count {
  std::atomic<int64_t> bytes{0}, most{0};
  const std::atomic<int64_t>* others;

  void add(size_t n) { most = std::max<int64_t>(most, (bytes += n) + *others); }
};

thread_local Count* counting = nullptr;  // what this thread's new blocks count in

class Arena final : public c10::Allocator {
 public:
  Arena(c10::Allocator* base, char* begin, size_t nbytes)
      : base_(base), begin_(begin), nbytes_(nbytes), granules_(nbytes / kGranule) {
    idle_.reserve(granules_.size());  // pages go back when there may be no memory for a list
    fresh_.reserve(granules_.size());
    add_gap(0, nbytes_);
  }

  c10::DataPtr allocate(size_t n) override;
  c10::DeleterFnPtr raw_deleter() const override { return &Arena::release; }
  void copy_data(void* to, const void* from, size_t count) const override { default_copy_data(to, from, count); }

  void open(bool is_open) {
    std::lock_guard<std::mutex> lock(mutex_);
    open_ = is_open;
    if (is_open) return;
    withdraw();
    most_taken_ = most_before_ = kept_bytes_ = 0;
  }

  // What is kept was taken in both of the last two steps: one that takes more than the others does not count.
  void begin_step() {
    std::lock_guard<std::mutex> lock(mutex_);
    kept_bytes_ = std::min(most_taken_, most_before_);
    most_before_ = most_taken_;
    most_taken_ = taken_bytes_;
  }

  void set_limit(size_t limit, bool strictly) {
    std::lock_guard<std::mutex> lock(mutex_);
    limit_ = strictly ? limit : std::max({limit, kept_bytes_, most_taken_});
    if (present_bytes_ > limit_) shed(present_bytes_ - limit_);
  }

  void give_back() {
    std::lock_guard<std::mutex> lock(mutex_);
    withdraw();
  }

  size_t present_bytes() {
    std::lock_guard<std::mutex> lock(mutex_);
    return present_bytes_;
  }

  size_t used_bytes() {
    std::lock_guard<std::mutex> lock(mutex_);
    return used_bytes_;
  }

  bool counts(Count* count, void* pointer) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (const auto block = blocks_.find(static_cast<char*>(pointer) - begin_); block != blocks_.end())
      return block->second.count == count;
    const auto block = elsewhere_.find(pointer);
    return block != elsewhere_.end() && block->second.count == count;
  }

  void end_count(Count* count) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [start, block] : blocks_)
      if (block.count == count) block.count = nullptr;
    std::erase_if(elsewhere_, [count](const auto& item) { return item.second.count == count; });
  }

  // A storage keeps the allocator that it was made with: that is this one from now on, if it was PyTorch's own. True if
  // its memory is not here yet, and will be.
  bool adopt(c10::StorageImpl& storage) {
    if (storage.allocator() == base_) storage.set_allocator(this);
    const bool is_large = storage.nbytes() >= kLeastBlock;
    return is_large && storage.allocator() == this && !is_ours(storage._mutable_data_ptr_no_checks().get());
  }

  void before_fork() { mutex_.lock(); }
  void after_fork() { mutex_.unlock(); }

 private:
  // What is known of some neighbouring pages.
  struct Granule {
    uint32_t blocks = 0;      // that lie in it, wholly or in part
    uint32_t free_since = 0;  // when the last of them went
    bool present = false;
    bool moved_to = false;    // pages were moved here
  };

  struct Block {
    size_t size;   // whole pages
    size_t asked;  // bytes that were wanted
    Count* count;  // what it counts in, if anything
  };

  bool is_ours(const void* pointer) const { return pointer >= begin_ && pointer < begin_ + nbytes_; }
  static void release(void* pointer);
  c10::DataPtr allocate_counted(size_t n);
  void leave(void* pointer);
  size_t place(size_t size) const;
  bool reach(size_t end);
  void withdraw();
  size_t missing(size_t start, size_t size) const;
  void take(size_t start, size_t size, size_t asked);
  void bring_pages();
  void free(size_t start);
  void shed(size_t nbytes);
  size_t idlest(size_t nbytes);
  bool move(size_t from, size_t to);
  void add_gap(size_t start, size_t size);
  void remove_gap(std::map<size_t, size_t>::iterator gap);

  std::mutex mutex_;
  c10::Allocator* const base_;
  char* const begin_;
  const size_t nbytes_;
  bool open_ = false;
  size_t limit_ = SIZE_MAX;
  size_t present_bytes_ = 0, used_bytes_ = 0;
  size_t taken_bytes_ = 0;                   // granules that blocks lie in: some more than the blocks have
  size_t most_taken_ = 0, most_before_ = 0;  // in this step and in the one before
  size_t kept_bytes_ = 0;                    // no limit is lower that is not strict
  size_t reached_ = 0;  // addresses from here on cannot be used yet, and count nowhere
  size_t moved_ = 0;    // granules that pages were moved to
  bool can_move_ = true;
  uint32_t clock_ = 0;
  std::vector<Granule> granules_;
  std::vector<std::pair<uint32_t, size_t>> idle_;  // room to list granules in, each with for how long it was free
  std::vector<size_t> fresh_;                      // room to list those of a block whose pages are not there
  std::map<size_t, size_t> gaps_;                // start -> size
  std::set<std::pair<size_t, size_t>> by_size_;  // the same, as (size, start)
  std::unordered_map<size_t, Block> blocks_;     // by their start
  std::unordered_map<void*, Block> elsewhere_;   // blocks of PyTorch's own allocator that are counted
};

Arena* arena = nullptr;  // lives as long as the process: its blocks may outlive everything else

c10::DataPtr Arena::allocate(size_t n) {
  if (n >= kLeastBlock && n <= nbytes_) {
    const size_t size = round_up(n, kPage);
    std::unique_lock<std::mutex> lock(mutex_);
    if (open_) {
      const size_t start = place(size);
      if (start != SIZE_MAX && reach(start + size)) {
        take(start, size, n);
        lock.unlock();
        char* const block = begin_ + start;
        c10::DataPtr owner{block, block, &Arena::release, c10::Device(c10::DeviceType::CPU)};
        c10::profiledCPUMemoryReporter().New(block, n);
        return owner;
      }
    }
  }
  return counting != nullptr && n > 0 ? allocate_counted(n) : base_->allocate(n);
}

c10::DataPtr Arena::allocate_counted(size_t n) {
  void* const block = base_->raw_allocate(n);
  c10::DataPtr owner{block, block, &Arena::release, c10::Device(c10::DeviceType::CPU)};
  std::lock_guard<std::mutex> lock(mutex_);
  elsewhere_.insert_or_assign(block, Block{0, n, counting});
  counting->add(n);
  return owner;
}

// A block of PyTorch's own allocator goes.
void Arena::leave(void* pointer) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto block = elsewhere_.find(pointer);
  if (block == elsewhere_.end()) return;
  block->second.count->bytes -= block->second.asked;
  elsewhere_.erase(block);
}

// Called by destructors, which may not throw. Where there is no memory to tell a profiler or to note that there is a
// gap, that is not done (a small block is lost then, as PyTorch tells the profiler first), and the process lives.
void Arena::release(void* pointer) {
  char* const block = static_cast<char*>(pointer);
  const bool is_ours = arena->is_ours(pointer);
  if (!is_ours) arena->leave(pointer);
  try {
    if (is_ours)
      c10::profiledCPUMemoryReporter().Delete(pointer);
    else
      arena->base_->raw_deleter()(pointer);
  } catch (const std::bad_alloc&) {
  }
  if (!is_ours) return;
  std::lock_guard<std::mutex> lock(arena->mutex_);
  try {
    arena->free(block - arena->begin_);
  } catch (const std::bad_alloc&) {
  }
}

// Among the gaps that fit best, the one that needs the fewest new pages.
size_t Arena::place(size_t size) const {
  size_t best = SIZE_MAX, fewest = SIZE_MAX;
  int tries = 0;
  for (auto gap = by_size_.lower_bound({size, 0}); gap != by_size_.end() && tries < kTries; ++gap, ++tries) {
    const size_t first = gap->second, end = gap->second + gap->first;
    const size_t last = end == nbytes_ ? first : end - size;  // never at the far end of the region
    for (const size_t start : {first, last}) {
      const size_t fresh = missing(start, size);
      if (fresh < fewest) best = start, fewest = fresh;
    }
    if (fewest == 0) break;
  }
  return best;
}

// Make addresses usable up to `end`; false where the system counts addresses and has no more.
bool Arena::reach(size_t end) {
  if (end <= reached_) return true;
  for (const size_t unit : {kGrowth, kGranule}) {
    const size_t wanted = std::min(round_up(end, unit), nbytes_);
    if (mprotect(begin_ + reached_, wanted - reached_, PROT_READ | PROT_WRITE) == 0) {
      madvise(begin_ + reached_, wanted - reached_, MADV_HUGEPAGE);
      reached_ = wanted;
      return true;
    }
  }
  return false;
}

// Give back all that no block uses: pages, and addresses behind the last block.
void Arena::withdraw() {
  shed(present_bytes_);
  if (gaps_.empty()) return;
  const auto [start, size] = *std::prev(gaps_.end());
  const size_t end = start + size == nbytes_ ? round_up(start, kGranule) : nbytes_;
  if (end < reached_ && mprotect(begin_ + end, reached_ - end, PROT_NONE) == 0) reached_ = end;
}

// Bytes of the granules of a block whose pages are not there.
size_t Arena::missing(size_t start, size_t size) const {
  size_t bytes = 0;
  const size_t end = std::min((start + size + kGranule - 1) / kGranule, granules_.size());
  for (size_t i = start / kGranule; i < end; ++i) bytes += granules_[i].present ? 0 : kGranule;
  return bytes;
}

void Arena::take(size_t start, size_t size, size_t asked) {
  auto gap = std::prev(gaps_.upper_bound(start));
  const size_t gap_start = gap->first, gap_end = gap->first + gap->second;
  remove_gap(gap);
  if (gap_start < start) add_gap(gap_start, start - gap_start);
  if (start + size < gap_end) add_gap(start + size, gap_end - start - size);
  blocks_.emplace(start, Block{size, asked, counting});
  if (counting != nullptr) counting->add(asked);
  used_bytes_ += size;
  const size_t end = (start + size + kGranule - 1) / kGranule;
  fresh_.clear();
  for (size_t i = start / kGranule; i < end; ++i) {
    if (granules_[i].blocks++ == 0) taken_bytes_ += kGranule;
    if (!granules_[i].present) fresh_.push_back(i);
  }
  most_taken_ = std::max(most_taken_, taken_bytes_);
  if (!fresh_.empty()) bring_pages();
}

// See that there are pages for the granules in `fresh_`. Where new ones would come over the limit, free ones are moved
// from other addresses: the system clears a new page, which takes it as long as a copy.
void Arena::bring_pages() {
  const size_t nbytes = present_bytes_ + fresh_.size() * kGranule;
  if (nbytes > limit_ && can_move_) {
    const size_t found = std::min(idlest(nbytes - limit_), fresh_.size());
    for (size_t k = 0; k < found && move(idle_[k].second, fresh_.back()); ++k) fresh_.pop_back();
  }
  for (const size_t i : fresh_) granules_[i].present = true;
  present_bytes_ += fresh_.size() * kGranule;
  if (present_bytes_ > limit_) shed(present_bytes_ - limit_);
}

// Move the pages of one granule to another that has none.
bool Arena::move(size_t from, size_t to) {
#ifdef MREMAP_DONTUNMAP
  if (!granules_[to].moved_to && moved_ >= kMostMoved) return false;
  char* const target = begin_ + to * kGranule;
  constexpr int kHow = MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP;
  if (mremap(begin_ + from * kGranule, kGranule, kGranule, kHow, target) == target) {
    moved_ += !granules_[to].moved_to;
    granules_[from].present = false;
    granules_[to].present = granules_[to].moved_to = true;
    return true;
  }
  // The system may have unmapped the target before it gave up.
  constexpr int kAnew = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  mmap(target, kGranule, PROT_READ | PROT_WRITE, kAnew, -1, 0);
  madvise(target, kGranule, MADV_HUGEPAGE);
#endif
  can_move_ = false;
  return false;
}

void Arena::free(size_t start) {
  const auto block = blocks_.find(start);
  size_t size = block->second.size;
  if (block->second.count != nullptr) block->second.count->bytes -= block->second.asked;
  blocks_.erase(block);
  used_bytes_ -= size;
  ++clock_;
  for (size_t i = start / kGranule; i < (start + size + kGranule - 1) / kGranule; ++i) {
    if (--granules_[i].blocks > 0) continue;
    granules_[i].free_since = clock_;
    taken_bytes_ -= kGranule;
  }
  const auto after = gaps_.find(start + size);
  if (after != gaps_.end()) {
    size += after->second;
    remove_gap(after);
  }
  const auto next = gaps_.lower_bound(start);
  if (next != gaps_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == start) {
      start = before->first;
      size += before->second;
      remove_gap(before);
    }
  }
  add_gap(start, size);
  if (!open_) withdraw();
}

// Give back pages that no block uses, those first that were free for longest, until so many bytes went or none is left.
void Arena::shed(size_t nbytes) {
  const size_t found = idlest(nbytes);
  for (size_t k = 0; k < found; ++k) {
    madvise(begin_ + idle_[k].second * kGranule, kGranule, MADV_DONTNEED);
    granules_[idle_[k].second].present = false;
  }
  present_bytes_ -= found * kGranule;
}

// List so many bytes of free pages in `idle_`, those that were free for longest: how many granules that are.
size_t Arena::idlest(size_t nbytes) {
  idle_.clear();
  for (size_t i = 0; i < reached_ / kGranule; ++i)
    if (granules_[i].present && granules_[i].blocks == 0) idle_.emplace_back(clock_ - granules_[i].free_since, i);
  const size_t found = std::min(idle_.size(), (nbytes + kGranule - 1) / kGranule);
  std::nth_element(idle_.begin(), idle_.begin() + found, idle_.end(), std::greater<>());
  return found;
}

void Arena::add_gap(size_t start, size_t size) {
  gaps_.emplace(start, size);
  by_size_.emplace(size, start);
}

void Arena::remove_gap(std::map<size_t, size_t>::iterator gap) {
  by_size_.erase({gap->second, gap->first});
  gaps_.erase(gap);
}

}  // namespace

extern "C" {

// Reserve `nbytes` of addresses and become PyTorch's CPU allocator; 0 if that worked. Once in a process.
int outgrow_arena_install(size_t nbytes) {
  nbytes = nbytes / kGranule * kGranule;
  void* const begin =
      mmap(nullptr, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (begin == MAP_FAILED) return 1;
  const uintptr_t first = round_up(reinterpret_cast<uintptr_t>(begin), kGranule);
  arena = new Arena(c10::GetCPUAllocator(), reinterpret_cast<char*>(first), nbytes - kGranule);
  // A child that another thread's allocation was forked in must not find the lock taken.
  pthread_atfork([] { arena->before_fork(); }, [] { arena->after_fork(); }, [] { arena->after_fork(); });
  c10::SetCPUAllocator(arena, UINT8_MAX);
  return c10::GetCPUAllocator() == arena ? 0 : 1;
}

// Serve large blocks from now on, or no longer: blocks that are out stay good, free pages go back.
void outgrow_arena_open(int is_open) { arena->open(is_open != 0); }

// A step begins.
void outgrow_arena_begin_step() { arena->begin_step(); }

// Give back all pages that no block uses, and the addresses behind the last block.
void outgrow_arena_give_back() { arena->give_back(); }

// Have as many bytes of pages as the process may have in all, less those of it that are elsewhere: `statm` is the open
// /proc/self/statm, which says how many there are. One call, since it is made before every large op. If not `strictly`,
// have at least as many as blocks lie in at their most in each step.
void outgrow_arena_keep_under(size_t nbytes, int statm, size_t page, int strictly) {
  char text[128];
  const ssize_t length = pread(statm, text, sizeof(text) - 1, 0);
  if (length <= 0) return;
  text[length] = 0;
  size_t addresses = 0, resident = 0;
  if (sscanf(text, "%zu %zu", &addresses, &resident) != 2) return;
  const size_t ours = nbytes + arena->present_bytes(), all = resident * page;
  arena->set_limit(std::max(ours, all) - all, strictly != 0);
}

size_t outgrow_arena_present_bytes() { return arena->present_bytes(); }

size_t outgrow_arena_used_bytes() { return arena->used_bytes(); }

// Have a storage that PyTorch's own allocator served get its memory here from now on; not 0 if that is elsewhere yet.
int outgrow_arena_adopt(void* storage) { return arena->adopt(*static_cast<c10::StorageImpl*>(storage)); }

// A count of its own: two numbers of 64 bits, bytes now, and at most with the number at `others`.
void* outgrow_arena_new_count(const std::atomic<int64_t>* others) { return new Count{{0}, {0}, others}; }

// Blocks that this thread makes from here on count in it; null: in none.
void outgrow_arena_count_in(void* count) { counting = static_cast<Count*>(count); }

// Whether the memory at `pointer` is a block that counts there.
int outgrow_arena_counts(void* count, void* pointer) { return arena->counts(static_cast<Count*>(count), pointer); }

// The count is not wanted any more; its blocks stay.
void outgrow_arena_end_count(void* count) {
  arena->end_count(static_cast<Count*>(count));
  delete static_cast<Count*>(count);
}
}
