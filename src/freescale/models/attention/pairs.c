/* Biases, SiLU and mask of HSTU attention, in one pass over the scores of a block.
 *
 * Scores are [samples, heads, rows, keys]: rows from position `begin` of their samples, keys from position 0. A row
 * attends to the keys before its limit, and to itself. `reversed` holds the position biases, the longest
 * distance first, so that a row reads them in the order of its keys. Plain C without libraries, called through ctypes.
 */

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef struct {
    int64_t samples, heads, rows, keys, begin, max_length; /* `max_length`: columns of limits and times */
    const int64_t *history;                                /* [samples] */
    const int64_t *limits;                                 /* [samples, max_length], read for candidates only */
    const double *query_time, *event_time;                 /* [samples, max_length] */
    const float *time, *by_cell;                           /* biases by time bucket, and by cell */
    const int32_t *bucket_of_cell;
    const float *reversed; /* [distances] */
    int64_t distances;
} block;

/* e^x within two units of the last place; written out, so that compilers vectorize the loops around it. */
static inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    float n = rintf(x * 1.44269504f);
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t bits = ((int32_t)n + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return p * power;
}

/* The leading bits of the interval between a query and each event, as a float: the index of the time tables. */
static void find_cells(double query_time, const double *restrict event_time, int32_t *restrict cells, int64_t count) {
    for (int64_t k = 0; k < count; k++) {
        float interval = (float)fabs(query_time - event_time[k]);
        int32_t bits;
        memcpy(&bits, &interval, sizeof bits);
        cells[k] = bits >> CELL_SHIFT;
    }
}

static void find_buckets(int32_t *restrict cells, const int32_t *restrict bucket_of_cell, int64_t count) {
    for (int64_t k = 0; k < count; k++) cells[k] = bucket_of_cell[cells[k]];
}

/* Scores and their biases -> weights. */
static void weigh(float *restrict score, const int32_t *restrict cells, const float *restrict by_cell,
                  const float *restrict by_distance, int64_t count) {
    for (int64_t k = 0; k < count; k++) {
        float x = score[k] + by_cell[cells[k]] + by_distance[k];
        score[k] = x / (1.0f + exponential(-x));
    }
}

/* The same; and gradients of weights -> gradients of scores, which are also summed by distance. */
static void weigh_back(float *restrict score, float *restrict gradient, const int32_t *restrict buckets,
                       const float *restrict time, const float *restrict by_distance, float *restrict d_distance,
                       int64_t count) {
    for (int64_t k = 0; k < count; k++) {
        float x = score[k] + time[buckets[k]] + by_distance[k];
        float gate = 1.0f / (1.0f + exponential(-x));
        float d_score = gradient[k] * gate * (1.0f + x * (1.0f - gate));
        score[k] = x * gate;
        gradient[k] = d_score;
        d_distance[k] += d_score;
    }
}

/* Neighbours mostly share their time bucket: runs of equal buckets are summed before they are written. */
static void add_by_bucket(const float *restrict gradient, const int32_t *restrict buckets, float *restrict d_bucket,
                          int64_t count) {
    for (int64_t begin = 0, end; begin < count; begin = end) {
        const int32_t bucket = buckets[begin];
        for (end = begin + 1; end < count && buckets[end] == bucket; end++);
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int64_t k = begin; k < end; k++) sum += gradient[k];
        d_bucket[bucket] += sum;
    }
}

/* The visible keys of a row: [0, seen), and for a candidate also itself. The limit of a history token is its place. */
typedef struct { int64_t seen, own, shift; } view; /* own: -1 if none. shift: offset into `reversed` */

static view view_of(const block *b, int64_t sample, int64_t place, int32_t *cells) {
    int64_t candidate = place >= b->history[sample];
    int64_t limit = candidate ? b->limits[sample * b->max_length + place] : place;
    view v = {candidate ? limit : place + 1, candidate ? place : -1, b->distances - 1 - limit};
    double query_time = b->query_time[sample * b->max_length + place];
    const double *event_time = b->event_time + sample * b->max_length;
    find_cells(query_time, event_time, cells, v.seen);
    if (candidate) find_cells(query_time, event_time + place, cells + place, 1);
    return v;
}

static void mask_row(const block *b, view v, float *row) {
    int64_t until = v.own < 0 ? b->keys : v.own;
    memset(row + v.seen, 0, (until - v.seen) * sizeof *row);
    if (v.own >= 0) memset(row + v.own + 1, 0, (b->keys - v.own - 1) * sizeof *row);
}

/* Scores -> silu(score + biases), 0 for invisible pairs; rows [first, last). `cells`: scratch of one int per key. */
void weights(const block *b, float *scores, int64_t first, int64_t last, int32_t *cells) {
    const float *nearest = b->reversed + b->distances - 1;
    for (int64_t s = 0; s < b->samples; s++)
        for (int64_t r = first; r < last; r++) {
            view v = view_of(b, s, b->begin + r, cells);
            for (int64_t h = 0; h < b->heads; h++) {
                float *score = scores + ((s * b->heads + h) * b->rows + r) * b->keys;
                weigh(score, cells, b->by_cell, b->reversed + v.shift, v.seen);
                if (v.own >= 0) weigh(score + v.own, cells + v.own, b->by_cell, nearest, 1);
                mask_row(b, v, score);
            }
        }
}

/* Scores -> weights, gradients of weights -> gradients of scores, and their sums by distance and by bucket. */
void gradients(const block *b, float *scores, float *upstream, int64_t first, int64_t last, int32_t *buckets,
               float *d_distance, float *d_bucket) {
    const int64_t zero = b->distances - 1;
    for (int64_t s = 0; s < b->samples; s++)
        for (int64_t r = first; r < last; r++) {
            view v = view_of(b, s, b->begin + r, buckets);
            find_buckets(buckets, b->bucket_of_cell, v.seen);
            if (v.own >= 0) find_buckets(buckets + v.own, b->bucket_of_cell, 1);
            for (int64_t h = 0; h < b->heads; h++) {
                int64_t start = ((s * b->heads + h) * b->rows + r) * b->keys, own = v.own;
                float *score = scores + start, *gradient = upstream + start;
                weigh_back(score, gradient, buckets, b->time, b->reversed + v.shift, d_distance + v.shift, v.seen);
                add_by_bucket(gradient, buckets, d_bucket, v.seen);
                if (own >= 0) {
                    weigh_back(score + own, gradient + own, buckets + own, b->time, b->reversed + zero,
                               d_distance + zero, 1);
                    add_by_bucket(gradient + own, buckets + own, d_bucket, 1);
                }
                mask_row(b, v, score);
                mask_row(b, v, gradient);
            }
        }
}
