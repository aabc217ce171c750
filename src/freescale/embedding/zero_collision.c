/* Lookup and insertion in a zero-collision table: see zero_collision_layout.py for its rows.
 *
 * A table holds some buckets of `slots` slots and a shared row each. Rows are numbered over the whole table: those of
 * bucket b begin at b * (slots + 1). A tag, one byte of an id's hash, stands for the id of each slot: a window of 128
 * slots is two or three cache lines of tags instead of sixteen of ids. Plain C without libraries, called by ctypes.
 */

#include <stdint.h>
#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "tags are read as little-endian words"
#endif

enum { NONE, TTL, LRU, LFU };
enum { BLOCK = 16 };       /* ids whose windows are fetched into the cache together */
enum { WORD = 8 };         /* tags per word */
enum { MOST_WINDOW = 128 };
static const int64_t EMPTY = -1, NEVER = INT64_MAX;

typedef struct {
    int64_t bits;           /* the whole table has 2^bits buckets */
    int64_t first, buckets; /* those of this table are [first, first + buckets) */
    int64_t slots, window;  /* per bucket; the slots that an id may have */
    int64_t *ids;           /* [buckets, slots + 1], as all arrays */
    int32_t *last_step, *time, *count;
    uint8_t *tags; /* 0 for free slots; one more word at the end */
} table;

typedef struct {
    int64_t kind, ttl, protected, step, time;
} policy;

/* Where an id may be: `begin` is the first row of its bucket in the arrays. */
typedef struct {
    int64_t begin, slot;
    uint8_t tag;
} place;

static inline uint64_t rotate(uint64_t x, int bits) { return x << bits | x >> (64 - bits); }

static inline uint64_t splitmix64(uint64_t z) {
    z += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

static inline uint64_t finalize(uint64_t h) {
    h = (h ^ h >> 33) * 0xFF51AFD7ED558CCDu;
    h = (h ^ h >> 33) * 0xC4CEB9FE1A85EC53u;
    return h ^ h >> 33;
}

static inline uint64_t murmur3(uint64_t x) {
    uint64_t a = rotate(rotate(x * 0x87C37B91114253D5u, 31) * 0x4CF5AD432745937Fu, 27) * 5 + 0x52DCE729u;
    uint64_t b = a * 5 + 0x38495AB5u;
    a ^= 16, b ^= 16;
    a += b, b += a;
    a = finalize(a), b = finalize(b);
    a += b, b += a;
    return a ^ b;
}

static inline place place_of(const table *t, int64_t id) {
    uint64_t hash = splitmix64((uint64_t)id);
    int64_t bucket = t->bits ? (int64_t)(hash >> (64 - t->bits)) : 0;
    place p = {(bucket - t->first) * (t->slots + 1), (int64_t)(murmur3((uint64_t)id) % (uint64_t)t->slots),
               (uint8_t)hash};
    p.tag += !p.tag;
    return p;
}

static inline int belongs_here(const table *t, int64_t id, place p) {
    return id != EMPTY && p.begin >= 0 && p.begin < t->buckets * (t->slots + 1);
}

/* The first slot in [begin, begin + count) of a bucket with this tag and id, or -1. Free slots have tag 0. */
static inline int64_t slot_among(const table *t, int64_t bucket, int64_t begin, int64_t count, uint8_t tag,
                                 int64_t id) {
    const uint64_t low = 0x0101010101010101u, high = 0x8080808080808080u;
    for (int64_t i = 0; i < count; i += WORD) {
        uint64_t word;
        memcpy(&word, t->tags + bucket + begin + i, WORD);
        word ^= low * tag;
        uint64_t equal = (word - low) & ~word & high; /* exact up to the first equal tag; the id decides */
        if (count - i < WORD) equal &= ((uint64_t)1 << WORD * (count - i)) - 1;
        for (; equal; equal &= equal - 1) {
            int64_t slot = begin + i + __builtin_ctzll(equal) / WORD;
            if (t->ids[bucket + slot] == id) return slot;
        }
    }
    return -1;
}

/* The first slot of a window with this tag and id, or -1. The window goes on at the beginning of the bucket. */
static inline int64_t slot_with(const table *t, place p, uint8_t tag, int64_t id) {
    int64_t ahead = t->slots - p.slot < t->window ? t->slots - p.slot : t->window;
    int64_t slot = slot_among(t, p.begin, p.slot, ahead, tag, id);
    return slot < 0 && ahead < t->window ? slot_among(t, p.begin, 0, t->window - ahead, tag, id) : slot;
}

static inline void prefetch_place(const table *t, place p) {
    __builtin_prefetch(t->tags + p.begin + p.slot);
    __builtin_prefetch(t->tags + p.begin + p.slot + 64);
    __builtin_prefetch(t->ids + p.begin + p.slot);
}

static inline void prefetch_use(const table *t, int64_t row) {
    __builtin_prefetch(t->last_step + row, 1);
    __builtin_prefetch(t->time + row, 1);
    __builtin_prefetch(t->count + row, 1);
}

/* Note that a step uses a slot. A second note of a step is void. */
static inline void note_use(const table *t, int64_t row, int64_t step, int64_t time) {
    if (t->last_step[row] == step) return;
    t->last_step[row] = (int32_t)step;
    t->count[row]++;
    if (t->time[row] < time) t->time[row] = (int32_t)time;
}

/* Find a block of ids: see `find`. Their rows in the arrays go to `rows`, with all bits inverted if they are shared.
 * Returns whether all belong to this table. */
static int find_block(const table *t, const int64_t *ids, int64_t size, int is_use, int64_t *rows) {
    place places[BLOCK];
    for (int64_t i = 0; i < size; i++) {
        places[i] = place_of(t, ids[i]);
        if (!belongs_here(t, ids[i], places[i])) return 0;
        prefetch_place(t, places[i]);
    }
    for (int64_t i = 0; i < size; i++) {
        int64_t slot = slot_with(t, places[i], places[i].tag, ids[i]);
        rows[i] = slot < 0 ? ~(places[i].begin + t->slots) : places[i].begin + slot;
        if (slot >= 0 && is_use) prefetch_use(t, rows[i]);
    }
    return 1;
}

/* Rows of ids, the shared one of their bucket for those without a slot, whose places go to `absent`. Returns their
 * number, or -1 if an id does not belong to this table. With a step from 0 on, notes that it uses the others. */
int64_t find(const table *t, const int64_t *ids, int64_t count, int64_t step, int64_t time, int64_t *rows,
             int64_t *absent) {
    int64_t missing = 0, offset = t->first * (t->slots + 1);
    for (int64_t block = 0; block < count; block += BLOCK) {
        int64_t size = count - block < BLOCK ? count - block : BLOCK;
        if (!find_block(t, ids + block, size, step >= 0, rows + block)) return -1;
        for (int64_t i = block; i < block + size; i++) {
            if (rows[i] < 0)
                rows[i] = ~rows[i], absent[missing++] = i;
            else if (step >= 0)
                note_use(t, rows[i], step, time);
            rows[i] += offset;
        }
    }
    return missing;
}

/* Keys of `count` used slots from `row` on: the smallest is evicted, NEVER is not. */
static inline void eviction_keys(const table *t, int64_t row, int64_t count, const policy *by, int64_t *restrict keys) {
    const int32_t *restrict last_step = t->last_step + row, *restrict time = t->time + row;
    const int32_t *restrict uses = t->count + row;
    int64_t newest_step = by->step - by->protected, newest_time = by->time - by->ttl;
    if (by->kind == TTL)
        for (int64_t i = 0; i < count; i++)
            keys[i] = last_step[i] < newest_step && time[i] < newest_time ? time[i] : NEVER;
    else if (by->kind == LRU)
        for (int64_t i = 0; i < count; i++) keys[i] = last_step[i] < newest_step ? last_step[i] : NEVER;
    else
        for (int64_t i = 0; i < count; i++)
            keys[i] = last_step[i] < newest_step ? (int64_t)uses[i] << 32 | last_step[i] : NEVER;
}

/* The slot of a full window that a new id takes, or -1. */
static int64_t slot_to_evict(const table *t, place p, const policy *by) {
    int64_t keys[MOST_WINDOW], least = NEVER;
    int64_t ahead = t->slots - p.slot < t->window ? t->slots - p.slot : t->window;
    eviction_keys(t, p.begin + p.slot, ahead, by, keys);
    eviction_keys(t, p.begin, t->window - ahead, by, keys + ahead);
    for (int64_t i = 0; i < t->window; i++) least = keys[i] < least ? keys[i] : least;
    if (least == NEVER) return -1;
    int64_t i = 0;
    while (keys[i] != least) i++;
    return i < ahead ? p.slot + i : i - ahead;
}

/* The row that a new id takes: the first free slot of its window, else the one to evict, else the shared row. */
static int64_t row_to_take(const table *t, place p, const policy *by) {
    int64_t slot = slot_with(t, p, 0, EMPTY);
    if (slot < 0 && by->kind != NONE) slot = slot_to_evict(t, p, by);
    return p.begin + (slot < 0 ? t->slots : slot);
}

static inline void insert_one(const table *t, int64_t id, place p, const policy *by, int64_t *row, int64_t *evicted) {
    *row = row_to_take(t, p, by);
    *evicted = t->ids[*row];
    if (*row == p.begin + t->slots) return;
    t->ids[*row] = id;
    t->tags[*row] = p.tag;
    t->last_step[*row] = (int32_t)by->step;
    t->time[*row] = (int32_t)by->time;
    t->count[*row] = 1;
}

/* Give slots to ids that have none, one after the other. `evicted`: the ids that had these slots, or EMPTY. */
void insert(const table *t, const int64_t *ids, int64_t count, const policy *by, int64_t *rows, int64_t *evicted) {
    place places[BLOCK];
    for (int64_t i = 0; i < count; i++) {
        if (i % BLOCK == 0)
            for (int64_t k = 0; k < BLOCK && i + k < count; k++) {
                places[k] = place_of(t, ids[i + k]);
                prefetch_place(t, places[k]);
                __builtin_prefetch(t->ids + places[k].begin + t->slots);
                prefetch_use(t, places[k].begin + places[k].slot);
            }
        insert_one(t, ids[i], places[i % BLOCK], by, rows + i, evicted + i);
        rows[i] += t->first * (t->slots + 1);
    }
}

/* The first used slot of the window that begins at each slot, or the shared row. */
void sample(const table *t, const int64_t *rows, int64_t count, int64_t *found) {
    int64_t stride = t->slots + 1, offset = t->first * stride;
    for (int64_t i = 0; i < count; i++) {
        int64_t slot = (rows[i] - offset) % stride, begin = rows[i] - offset - slot, probes = 0;
        while (probes < t->window && !t->tags[begin + slot]) {
            slot = slot + 1 < t->slots ? slot + 1 : 0;
            probes++;
        }
        found[i] = begin + (probes < t->window ? slot : t->slots) + offset;
    }
}

/* Initial rows of ids: uniform numbers from -scale to scale, by a hash of the key, the id and the column. */
void initial_rows(const int64_t *ids, int64_t count, int64_t dim, int64_t key, double scale, double *restrict rows) {
    for (int64_t i = 0; i < count; i++) {
        uint64_t hash = splitmix64((uint64_t)(ids[i] ^ key));
        for (int64_t column = 0; column < dim; column++) {
            double unit = (double)(int64_t)(splitmix64(hash + (uint64_t)column) >> 11) * 0x1p-53;
            rows[i * dim + column] = (unit * 2.0 - 1.0) * scale;
        }
    }
}

/* Free the slots at rows. */
void release(const table *t, const int64_t *rows, int64_t count) {
    int64_t offset = t->first * (t->slots + 1);
    for (int64_t i = 0; i < count; i++) {
        t->ids[rows[i] - offset] = EMPTY;
        t->tags[rows[i] - offset] = 0;
    }
}

/* Compute all tags. */
void compute_tags(const table *t) {
    for (int64_t row = 0; row < t->buckets * (t->slots + 1); row++)
        t->tags[row] = t->ids[row] == EMPTY ? 0 : place_of(t, t->ids[row]).tag;
}
