// KV blocks copied and digested in one pass over their bytes, so that a hand-over reads memory once.
//
// The digest is XXH3 with 128 bits and a seed, as python's xxhash computes it: whoever has no compiler must find the
// same. What is implemented is the algorithm for inputs above 240 bytes (github.com/Cyan4973/xxHash, its
// specification); shorter ones are refused.
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace baton {
namespace {

constexpr size_t kLeast = 241;           // bytes
constexpr size_t kStripe = 64;           // bytes that the eight accumulators take at once
constexpr size_t kStripesPerScramble = 16;
constexpr size_t kRound = kStripe * kStripesPerScramble;
constexpr size_t kSecretBytes = 192;
constexpr size_t kLastStripe = kSecretBytes - kStripe - 7;  // where in the secret the last stripe's keys begin
constexpr size_t kLowKeys = 11, kHighKeys = kSecretBytes - kStripe - 11;

constexpr uint64_t kPrime32[] = {0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D};
constexpr uint64_t kPrime64[] = {0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63,
                                 0x27D4EB2F165667C5};

// The default secret, as eight-byte words in little-endian order.
constexpr uint64_t kSecret[kSecretBytes / 8] = {
    0xBE4BA423396CFEB8, 0x1CAD21F72C81017C, 0xDB979083E96DD4DE, 0x1F67B3B7A4A44072,
    0x78E5C0CC4EE679CB, 0x2172FFCC7DD05A82, 0x8E2443F7744608B8, 0x4C263A81E69035E0,
    0xCB00C391BB52283C, 0xA32E531B8B65D088, 0x4EF90DA297486471, 0xD8ACDEA946EF1938,
    0x3F349CE33F76FAA8, 0x1D4F0BC7C7BBDCF9, 0x3159B4CD4BE0518A, 0x647378D9C97E9FC8,
    0xC3EBD33483ACC5EA, 0xEB6313FAFFA081C5, 0x49DAF0B751DD0D17, 0x9E68D429265516D3,
    0xFCA1477D58BE162B, 0xCE31D07AD1B8F88F, 0x280416958F3ACB45, 0x7E404BBBCAFBD7AF,
};

uint64_t word_at(const void* at) {
  uint64_t word;
  std::memcpy(&word, at, sizeof word);
  return word;
}

// Where the bytes of a stripe go besides: nowhere, into memory by way of the caches, or past them.
enum class Store { kNone, kCached, kStreamed };

#if defined(__SSE2__)

// The widest words that the compiler may use, and what is done with them.
#if defined(__AVX2__)
using Wide = __m256i;
Wide load(const void* at) { return _mm256_loadu_si256(static_cast<const Wide*>(at)); }
void store(void* at, Wide x) { _mm256_storeu_si256(static_cast<Wide*>(at), x); }
void stream(void* at, Wide x) { _mm256_stream_si256(static_cast<Wide*>(at), x); }
Wide exclusive_or(Wide a, Wide b) { return _mm256_xor_si256(a, b); }
Wide sum(Wide a, Wide b) { return _mm256_add_epi64(a, b); }
Wide product_of_halves(Wide a, Wide b) { return _mm256_mul_epu32(a, b); }  // of the lower 32 bits of each 64
Wide swapped(Wide x) { return _mm256_shuffle_epi32(x, _MM_SHUFFLE(1, 0, 3, 2)); }
Wide repeated(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
template <int kBits> Wide right(Wide x) { return _mm256_srli_epi64(x, kBits); }
template <int kBits> Wide left(Wide x) { return _mm256_slli_epi64(x, kBits); }
#else
using Wide = __m128i;
Wide load(const void* at) { return _mm_loadu_si128(static_cast<const Wide*>(at)); }
void store(void* at, Wide x) { _mm_storeu_si128(static_cast<Wide*>(at), x); }
void stream(void* at, Wide x) { _mm_stream_si128(static_cast<Wide*>(at), x); }
Wide exclusive_or(Wide a, Wide b) { return _mm_xor_si128(a, b); }
Wide sum(Wide a, Wide b) { return _mm_add_epi64(a, b); }
Wide product_of_halves(Wide a, Wide b) { return _mm_mul_epu32(a, b); }
Wide swapped(Wide x) { return _mm_shuffle_epi32(x, _MM_SHUFFLE(1, 0, 3, 2)); }
Wide repeated(uint32_t x) { return _mm_set1_epi32(static_cast<int>(x)); }
template <int kBits> Wide right(Wide x) { return _mm_srli_epi64(x, kBits); }
template <int kBits> Wide left(Wide x) { return _mm_slli_epi64(x, kBits); }
#endif

constexpr size_t kWide = sizeof(Wide);

// The eight accumulators, and one stripe or one scramble of them.
class Lanes {
 public:
  explicit Lanes(const uint64_t (&start)[8]) {
    for (size_t i = 0; i < kWides; ++i) lanes_[i] = load(reinterpret_cast<const uint8_t*>(start) + kWide * i);
  }

  template <Store kStore>
  void take(const uint8_t* source, uint8_t* target, const uint8_t* keys) {
    for (size_t i = 0; i < kWides; ++i) {
      // Read once: what is stored and what is digested are the same bytes, whoever writes to the source meanwhile.
      const Wide data = load(source + kWide * i);
      if constexpr (kStore == Store::kCached) store(target + kWide * i, data);
      if constexpr (kStore == Store::kStreamed) stream(target + kWide * i, data);
      const Wide keyed = exclusive_or(data, load(keys + kWide * i));
      lanes_[i] = sum(lanes_[i], sum(product_of_halves(keyed, right<32>(keyed)), swapped(data)));
    }
  }

  void scramble(const uint8_t* keys) {
    const Wide prime = repeated(kPrime32[0]);
    for (size_t i = 0; i < kWides; ++i) {
      const Wide mixed = exclusive_or(exclusive_or(lanes_[i], right<47>(lanes_[i])), load(keys + kWide * i));
      const Wide high = product_of_halves(right<32>(mixed), prime);
      lanes_[i] = sum(product_of_halves(mixed, prime), left<32>(high));
    }
  }

  void words(uint64_t (&words)[8]) const {
    for (size_t i = 0; i < kWides; ++i) store(reinterpret_cast<uint8_t*>(words) + kWide * i, lanes_[i]);
  }

  static void finish_stores() { _mm_sfence(); }

 private:
  static constexpr size_t kWides = kStripe / kWide;
  Wide lanes_[kWides];
};

#else

constexpr size_t kWide = 1;

class Lanes {
 public:
  explicit Lanes(const uint64_t (&start)[8]) { std::memcpy(lanes_, start, sizeof lanes_); }

  template <Store kStore>
  void take(const uint8_t* source, uint8_t* target, const uint8_t* keys) {
    uint64_t data[8];
    std::memcpy(data, source, kStripe);
    if constexpr (kStore != Store::kNone) std::memcpy(target, data, kStripe);
    for (int i = 0; i < 8; ++i) {
      const uint64_t keyed = data[i] ^ word_at(keys + 8 * i);
      lanes_[i ^ 1] += data[i];
      lanes_[i] += (keyed & 0xFFFFFFFF) * (keyed >> 32);
    }
  }

  void scramble(const uint8_t* keys) {
    for (int i = 0; i < 8; ++i) {
      lanes_[i] = (lanes_[i] ^ lanes_[i] >> 47 ^ word_at(keys + 8 * i)) * kPrime32[0];
    }
  }

  void words(uint64_t (&words)[8]) const { std::memcpy(words, lanes_, sizeof lanes_); }

  static void finish_stores() {}

 private:
  uint64_t lanes_[8];
};

#endif

uint64_t folded_product(uint64_t a, uint64_t b) {
  const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

uint64_t merged(const uint64_t (&lanes)[8], const uint8_t* keys, uint64_t start) {
  uint64_t hash = start;
  for (int i = 0; i < 8; i += 2) {
    hash += folded_product(lanes[i] ^ word_at(keys + 8 * i), lanes[i + 1] ^ word_at(keys + 8 * i + 8));
  }
  hash = (hash ^ hash >> 37) * 0x165667919E3779F9;
  return hash ^ hash >> 32;
}

void put_big_endian(uint8_t* at, uint64_t word) {
  for (int i = 0; i < 8; ++i) at[i] = static_cast<uint8_t>(word >> (56 - 8 * i));
}

void seed_secret(uint8_t (&secret)[kSecretBytes], uint64_t seed) {
  for (size_t i = 0; i < kSecretBytes / 8; ++i) {
    const uint64_t word = i % 2 ? kSecret[i] - seed : kSecret[i] + seed;
    std::memcpy(secret + 8 * i, &word, sizeof word);
  }
}

// Stripes of ``source`` from ``begin`` to ``end``, with the keys of a round from its beginning.
template <Store kStore>
void take_stripes(Lanes& lanes, const uint8_t* source, uint8_t* target, size_t begin, size_t end, const uint8_t* keys) {
  for (size_t at = begin, key = 0; at < end; at += kStripe, key += 8) {
    lanes.take<kStore>(source + at, target + at, keys + key);
  }
}

// One block: ``size`` bytes, a multiple of a stripe. The last stripe is not counted into a round: it has its own keys.
template <Store kStore>
void move_block(const uint8_t* source, uint8_t* target, size_t size, uint64_t seed, uint8_t* digest) {
  uint8_t secret[kSecretBytes];
  seed_secret(secret, seed);
  Lanes lanes({kPrime32[2], kPrime64[0], kPrime64[1], kPrime64[2], kPrime64[3], kPrime32[1], kPrime64[4], kPrime32[0]});
  const size_t rounds = (size - 1) / kRound * kRound;
  for (size_t round = 0; round < rounds; round += kRound) {
    take_stripes<kStore>(lanes, source, target, round, round + kRound, secret);
    lanes.scramble(secret + kSecretBytes - kStripe);
  }
  const size_t rest = rounds + (size - 1 - rounds) / kStripe * kStripe;
  take_stripes<kStore>(lanes, source, target, rounds, rest, secret);
  lanes.take<kStore>(source + size - kStripe, target + size - kStripe, secret + kLastStripe);
  uint64_t words[8];
  lanes.words(words);
  put_big_endian(digest, merged(words, secret + kHighKeys, ~(size * kPrime64[1])));
  put_big_endian(digest + 8, merged(words, secret + kLowKeys, size * kPrime64[0]));
}

template <Store kStore>
void move_blocks(const uint8_t* source, const uint64_t* from, uint8_t* target, const uint64_t* to, size_t count,
                 size_t size, uint64_t seed, uint8_t* digests) {
  for (size_t i = 0; i < count; ++i) {
    uint8_t* const stored = kStore == Store::kNone ? nullptr : target + to[i] * size;
    move_block<kStore>(source + from[i] * size, stored, size, seed + i, digests + 16 * i);
  }
  Lanes::finish_stores();
}

}  // namespace
}  // namespace baton

extern "C" {
#pragma GCC visibility push(default)

// The digests [count, 16] of blocks ``from`` [count] of ``source``, which are ``size`` bytes each, with seeds from
// ``seed`` on. With a ``target`` they are copied into its blocks ``to`` [count] as well. 0, or 1 when the size is too
// small for the algorithm, or no multiple of a stripe.
int baton_kv_move(const uint8_t* source, const uint64_t* from, uint8_t* target, const uint64_t* to, size_t count,
                  size_t size, uint64_t seed, uint8_t* digests) {
  using baton::Store;
  if (size < baton::kLeast || size % baton::kStripe) return 1;
  if (target == nullptr) {
    baton::move_blocks<Store::kNone>(source, from, target, to, count, size, seed, digests);
  } else if (reinterpret_cast<uintptr_t>(target) % baton::kWide) {
    baton::move_blocks<Store::kCached>(source, from, target, to, count, size, seed, digests);
  } else {
    baton::move_blocks<Store::kStreamed>(source, from, target, to, count, size, seed, digests);
  }
  return 0;
}

#pragma GCC visibility pop
}
