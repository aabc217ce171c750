/* What happens to every pair of a query and a key, in one pass over the scores of a block.
 *
 * Scores are [samples, heads, rows, keys]: rows from place `begin` of their samples, keys from place 0. A row sees the
 * keys of the history up to itself, and itself. `reversed` holds the amounts for distances, the longest first, so that
 * a row reads them in the order of its keys. Plain C, no library: compiled on first use, called through ctypes.
 */

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef struct {
    int64_t samples, heads, rows, keys, begin, longest; /* `longest`: places of a sample in asked and event */
    const int64_t *history;                             /* [samples] */
    const double *asked, *event;                        /* [samples, longest] */
    const float *time, *by_cell;                        /* amounts by time bucket, and by cell */
    const int32_t *bucket_of_cell;
    const float *reversed; /* [distances] */
    int64_t distances;
} block;

/* e^x within two units of the last place; written out, so that a compiler turns the loops around it into vectors. */
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

/* The leading bits of the time between a question and each event, as a float: what tables of time are indexed by. */
static void find_cells(double asked, const double *restrict event, int32_t *restrict cells, int64_t count) {
    for (int64_t k = 0; k < count; k++) {
        float apart = (float)fabs(asked - event[k]);
        int32_t bits;
        memcpy(&bits, &apart, sizeof bits);
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

/* The same; and gradients of weights -> gradients of scores, which are also added up by distance. */
static void weigh_back(float *restrict score, float *restrict gradient, const int32_t *restrict buckets,
                       const float *restrict time, const float *restrict by_distance, float *restrict of_distance,
                       int64_t count) {
    for (int64_t k = 0; k < count; k++) {
        float x = score[k] + time[buckets[k]] + by_distance[k];
        float opened = 1.0f / (1.0f + exponential(-x));
        float of_score = gradient[k] * opened * (1.0f + x * (1.0f - opened));
        score[k] = x * opened;
        gradient[k] = of_score;
        of_distance[k] += of_score;
    }
}

/* Neighbours mostly share their time bucket: as long as they do, they are added up before they are written. */
static void add_by_bucket(const float *restrict gradient, const int32_t *restrict buckets, float *restrict of_bucket,
                          int64_t count) {
    for (int64_t begin = 0, end; begin < count; begin = end) {
        const int32_t bucket = buckets[begin];
        for (end = begin + 1; end < count && buckets[end] == bucket; end++);
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int64_t k = begin; k < end; k++) sum += gradient[k];
        of_bucket[bucket] += sum;
    }
}

/* What a row sees: keys [0, seen), and if it is a candidate, itself. */
typedef struct { int64_t seen, own, shift; } view; /* own: -1 without. shift: of amounts by distance */

static view view_of(const block *b, int64_t sample, int64_t place, int32_t *cells) {
    int64_t history = b->history[sample], candidate = place >= history;
    view v = {candidate ? history : place + 1, candidate ? place : -1,
              b->distances - 1 - (candidate ? history : place)};
    double asked = b->asked[sample * b->longest + place];
    const double *event = b->event + sample * b->longest;
    find_cells(asked, event, cells, v.seen);
    if (candidate) find_cells(asked, event + place, cells + place, 1);
    return v;
}

static void hide(const block *b, view v, float *row) {
    int64_t until = v.own < 0 ? b->keys : v.own;
    memset(row + v.seen, 0, (until - v.seen) * sizeof *row);
    if (v.own >= 0) memset(row + v.own + 1, 0, (b->keys - v.own - 1) * sizeof *row);
}

/* Scores -> silu(score + biases), 0 where nothing is seen; of rows [first, last). `cells`: room for all keys. */
void weights(const block *b, float *scores, int64_t first, int64_t last, int32_t *cells) {
    const float *nearest = b->reversed + b->distances - 1;
    for (int64_t s = 0; s < b->samples; s++)
        for (int64_t r = first; r < last; r++) {
            view v = view_of(b, s, b->begin + r, cells);
            for (int64_t h = 0; h < b->heads; h++) {
                float *score = scores + ((s * b->heads + h) * b->rows + r) * b->keys;
                weigh(score, cells, b->by_cell, b->reversed + v.shift, v.seen);
                if (v.own >= 0) weigh(score + v.own, cells + v.own, b->by_cell, nearest, 1);
                hide(b, v, score);
            }
        }
}

/* Scores -> weights, gradients of weights -> gradients of scores, and their sums by distance and by bucket. */
void gradients(const block *b, float *scores, float *upstream, int64_t first, int64_t last, int32_t *buckets,
               float *of_distance, float *of_bucket) {
    const int64_t zero = b->distances - 1;
    for (int64_t s = 0; s < b->samples; s++)
        for (int64_t r = first; r < last; r++) {
            view v = view_of(b, s, b->begin + r, buckets);
            find_buckets(buckets, b->bucket_of_cell, v.seen);
            if (v.own >= 0) find_buckets(buckets + v.own, b->bucket_of_cell, 1);
            for (int64_t h = 0; h < b->heads; h++) {
                int64_t start = ((s * b->heads + h) * b->rows + r) * b->keys, own = v.own;
                float *score = scores + start, *gradient = upstream + start;
                weigh_back(score, gradient, buckets, b->time, b->reversed + v.shift, of_distance + v.shift, v.seen);
                add_by_bucket(gradient, buckets, of_bucket, v.seen);
                if (own >= 0) {
                    weigh_back(score + own, gradient + own, buckets + own, b->time, b->reversed + zero,
                               of_distance + zero, 1);
                    add_by_bucket(gradient + own, buckets + own, of_bucket, 1);
                }
                hide(b, v, score);
                hide(b, v, gradient);
            }
        }
}
