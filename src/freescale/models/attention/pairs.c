/* Biases, SiLU and mask of HSTU attention, in one pass over the scores of a block.
 *
 * Scores are [samples, heads, rows, keys]: rows from position `begin` of their samples. The keys are the first far keys
 * of a sample, which all rows see, then its positions from `first` to `end`, then, if these end before the rows, those
 * from `own` on. A row attends to near keys before its limit, to the far keys before them, and to itself. `reversed`
 * holds the position biases, the longest distance first, so that a row reads them in the order of its keys. What belongs
 * to far keys is gathered before it is used: in runs of a few keys the loops below would not be vectorized. Plain C
 * without libraries, called through ctypes.
 */

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef struct {
    int64_t samples, heads, rows, keys, begin, max_length; /* `max_length`: columns of limits and times */
    int64_t far, first, end, own;   /* number of far keys, and the positions of the others */
    int64_t head, segment, period;  /* far keys: the first `head`, then the end of each period from `segment` on */
    const int64_t *history;                                /* [samples] */
    const int64_t *limits;                                 /* [samples, max_length], read for candidates only */
    const int64_t *begins;                                 /* [samples, max_length]: first near keys. NULL: all are 0 */
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

/* Keys of a row in a run: their first column, the position of the first one, their number. */
typedef struct { int64_t column, position, count; } run;

/* What a row sees. `own`: its position if it is a candidate, else -1: a history token is the last of its near keys. */
typedef struct { int64_t begin, seen, own, limit; } view;

static view view_of(const block *b, int64_t sample, int64_t place) {
    int64_t candidate = place >= b->history[sample];
    int64_t limit = candidate ? b->limits[sample * b->max_length + place] : place;
    view v = {b->first, candidate ? limit : place + 1, candidate ? place : -1, limit};
    int64_t begin = b->begins ? b->begins[sample * b->max_length + place] : 0;
    if (v.seen > b->end) v.seen = b->end; /* only padding sees more */
    if (begin > v.begin) v.begin = begin;
    if (v.begin > v.seen) v.begin = v.seen;
    return v;
}

/* The far keys of a block, which all its rows see; returns the number of runs. */
static int64_t find_far(const block *b, run *runs) {
    int64_t n = 0, head = b->head < b->far ? b->head : b->far, summaries = b->period - b->segment;
    if (head > 0) runs[n++] = (run){0, 0, head};
    for (int64_t column = head; column < b->far; column += summaries) {
        int64_t left = b->far - column, segment = (column - head) / summaries;
        int64_t position = head + segment * b->period + b->segment;
        runs[n++] = (run){column, position, left < summaries ? left : summaries};
    }
    return n;
}

/* The far keys between the first near key of a block and that of a row. */
static int64_t find_far_between(const block *b, view v, run *runs) {
    int64_t n = 0;
    for (int64_t position = b->first; position < v.begin;) {
        int64_t within = (position - b->head) % b->period;
        int64_t visible = position < b->head || within >= b->segment;
        int64_t left = position < b->head ? b->head - position : (visible ? b->period : b->segment) - within;
        int64_t count = left < v.begin - position ? left : v.begin - position;
        if (b->period == 1 && !visible) break; /* there are no far keys behind the head */
        if (visible) runs[n++] = (run){b->far + position - b->first, position, count};
        position += count;
    }
    return n;
}

/* The visible keys of a row behind the far ones, in the order of their columns, and their cells; returns the number of
 * runs. */
static int64_t find_runs(const block *b, int64_t sample, int64_t place, view v, run *runs, int32_t *cells) {
    int64_t n = b->begins ? find_far_between(b, v, runs) : 0, own = v.own;
    if (v.seen > v.begin) runs[n++] = (run){b->far + v.begin - b->first, v.begin, v.seen - v.begin};
    if (own >= 0) runs[n++] = (run){b->far + (own < b->end ? own - b->first : b->end - b->first + own - b->own), own, 1};
    double query_time = b->query_time[sample * b->max_length + place];
    const double *event_time = b->event_time + sample * b->max_length;
    for (run *r = runs; r < runs + n; r++) find_cells(query_time, event_time + r->position, cells + r->column, r->count);
    return n;
}

/* The offset into `reversed` of the first key of a run. */
static int64_t distance_of(const block *b, view v, const run *r) {
    return b->distances - 1 - (r->position == v.own ? 0 : v.limit - r->position);
}

static void mask_row(const block *b, const run *runs, int64_t n, float *row) {
    int64_t column = b->far;
    for (const run *r = runs; r < runs + n; r++) {
        memset(row + column, 0, (r->column - column) * sizeof *row);
        column = r->column + r->count;
    }
    memset(row + column, 0, (b->keys - column) * sizeof *row);
}

/* Memory of a thread: one cell per key, the runs of far keys and behind them those of a row, and values of far keys. */
typedef struct { int32_t *cells; run *runs; double *far_time; float *far_bias, *d_far_bias; } scratch;

/* The times of the far keys of a sample. Copied in runs: a gather instruction takes longer than all that follows. */
static void copy_times(const block *b, int64_t sample, const scratch *m, int64_t far) {
    const double *event_time = b->event_time + sample * b->max_length;
    for (const run *k = m->runs; k < m->runs + far; k++)
        memcpy(m->far_time + k->column, event_time + k->position, k->count * sizeof *event_time);
}

/* The position biases of the far keys of a row. */
static void copy_biases(const block *b, view v, const scratch *m, int64_t far) {
    for (const run *k = m->runs; k < m->runs + far; k++)
        memcpy(m->far_bias + k->column, b->reversed + distance_of(b, v, k), k->count * sizeof *m->far_bias);
}

static void add(const float *restrict x, float *restrict total, int64_t count) {
    for (int64_t k = 0; k < count; k++) total[k] += x[k];
}

/* Scores -> silu(score + biases), 0 for invisible pairs; rows [first, last). */
void weights(const block *b, float *scores, int64_t first, int64_t last, const scratch *m) {
    int64_t far = find_far(b, m->runs);
    run *runs = m->runs + far;
    for (int64_t s = 0; s < b->samples; s++) {
        copy_times(b, s, m, far);
        for (int64_t r = first; r < last; r++) {
            view v = view_of(b, s, b->begin + r);
            int64_t n = find_runs(b, s, b->begin + r, v, runs, m->cells);
            find_cells(b->query_time[s * b->max_length + b->begin + r], m->far_time, m->cells, b->far);
            copy_biases(b, v, m, far);
            for (int64_t h = 0; h < b->heads; h++) {
                float *score = scores + ((s * b->heads + h) * b->rows + r) * b->keys;
                weigh(score, m->cells, b->by_cell, m->far_bias, b->far);
                for (const run *k = runs; k < runs + n; k++)
                    weigh(score + k->column, m->cells + k->column, b->by_cell, b->reversed + distance_of(b, v, k),
                          k->count);
                mask_row(b, runs, n, score);
            }
        }
    }
}

/* Scores -> weights, gradients of weights -> gradients of scores, and their sums by distance and by bucket. */
void gradients(const block *b, float *scores, float *upstream, int64_t first, int64_t last, const scratch *m,
               float *d_distance, float *d_bucket) {
    int64_t far = find_far(b, m->runs);
    run *runs = m->runs + far;
    int32_t *buckets = m->cells;
    for (int64_t s = 0; s < b->samples; s++) {
        copy_times(b, s, m, far);
        for (int64_t r = first; r < last; r++) {
            view v = view_of(b, s, b->begin + r);
            int64_t n = find_runs(b, s, b->begin + r, v, runs, buckets);
            find_cells(b->query_time[s * b->max_length + b->begin + r], m->far_time, buckets, b->far);
            find_buckets(buckets, b->bucket_of_cell, b->far);
            for (const run *k = runs; k < runs + n; k++) find_buckets(buckets + k->column, b->bucket_of_cell, k->count);
            copy_biases(b, v, m, far);
            memset(m->d_far_bias, 0, b->far * sizeof *m->d_far_bias);
            for (int64_t h = 0; h < b->heads; h++) {
                int64_t start = ((s * b->heads + h) * b->rows + r) * b->keys;
                weigh_back(scores + start, upstream + start, buckets, b->time, m->far_bias, m->d_far_bias, b->far);
                add_by_bucket(upstream + start, buckets, d_bucket, b->far);
                for (const run *k = runs; k < runs + n; k++) {
                    float *score = scores + start + k->column, *gradient = upstream + start + k->column;
                    int64_t shift = distance_of(b, v, k);
                    weigh_back(score, gradient, buckets + k->column, b->time, b->reversed + shift, d_distance + shift,
                               k->count);
                    add_by_bucket(gradient, buckets + k->column, d_bucket, k->count);
                }
                mask_row(b, runs, n, scores + start);
                mask_row(b, runs, n, upstream + start);
            }
            for (const run *k = m->runs; k < runs; k++)
                add(m->d_far_bias + k->column, d_distance + distance_of(b, v, k), k->count);
        }
    }
}
