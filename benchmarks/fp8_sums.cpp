// How long may sums in Hopper's FP8 tensor cores be? Errors of an MXFP4 expert with E4M3 rows of one scale, by the
// number of columns that the tensor cores add up before the sum goes to float32.
//
//     g++ -O3 -march=native -ffast-math -fno-finite-math-only -o fp8_sums benchmarks/fp8_sums.cpp
//     ./fp8_sums H F N ROWS LARGE SEED    (N: columns of y that are computed; LARGE: 1 for four large columns of x)
//
// Sums are those of add_coarsely in tests/support/cuda_emulator/cuda.h. The reference rounds x and h alike, and adds
// exactly. "tokens" are rows; "six experts" are six random rows with random weights.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

using Floats = std::vector<float>;

const float kE2m1[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};

float to_e4m3(float v) {
    const float magnitude = std::min(fabsf(v), 448.0f);
    if (magnitude == 0) return 0;
    int exponent;
    frexpf(magnitude, &exponent);
    const float unit = ldexpf(1, std::max(exponent - 1, -6) - 3);
    return copysignf(std::min(nearbyintf(magnitude / unit) * unit, 448.0f), v);
}

float to_bf16(float v) {
    uint32_t bits;
    memcpy(&bits, &v, 4);
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000;
    memcpy(&v, &bits, 4);
    return v;
}

// 32 products and the sum so far: each is cut off 13 bits behind the largest one's first bit, and so is the new sum.
float add_32(float sum, const float* a, const float* b) {
    float products[32], largest = 0;
    for (int i = 0; i < 32; ++i) products[i] = a[i] * b[i];
    for (int i = 0; i < 32; ++i) largest = std::max(largest, fabsf(products[i]));
    largest = std::max(largest, fabsf(sum));
    if (largest == 0) return 0;
    const int exponent = ilogbf(largest);
    const float scale = ldexpf(1, 13 - exponent);
    int units = 0;
    for (int i = 0; i < 32; ++i) units += static_cast<int>(products[i] * scale);
    units += static_cast<int>(sum * scale);
    if (units == 0) return 0;
    const int cut = std::max(0, 31 - __builtin_clz(std::abs(units)) - 13);
    const int kept = std::abs(units) >> cut << cut;
    return ldexpf(units < 0 ? -kept : kept, exponent - 13);
}

// Of k columns, in float32 after each `interval`; exact where that is 0.
float dot(const float* a, const float* b, int k, int interval) {
    if (interval == 0) {
        double sum = 0;
        for (int i = 0; i < k; ++i) sum += static_cast<double>(a[i]) * b[i];
        return sum;
    }
    float total = 0;
    for (int first = 0; first < k; first += interval) {
        float sum = 0;
        for (int i = first; i < std::min(k, first + interval); i += 32) sum = add_32(sum, a + i, b + i);
        total += sum;
    }
    return total;
}

Floats mxfp4(int rows, int columns, std::mt19937& random) {
    std::normal_distribution<float> normal;
    Floats weights(static_cast<size_t>(rows) * columns);
    for (float& w : weights) w = normal(random);
    for (size_t group = 0; group < weights.size(); group += 32) {
        float most = 0;
        for (int i = 0; i < 32; ++i) most = std::max(most, fabsf(weights[group + i]));
        const float scale = exp2f(floorf(log2f(most)) - 2);
        for (int i = 0; i < 32; ++i) {
            float& w = weights[group + i];
            const float magnitude = fabsf(w) / scale;
            int best = 0;
            for (int q = 1; q < 8; ++q) {
                if (fabsf(kE2m1[q] - magnitude) < fabsf(kE2m1[best] - magnitude)) best = q;
            }
            w = copysignf(kE2m1[best] * scale, w);
        }
    }
    return weights;
}

// Rows in E4M3, and their scales.
Floats quantize(Floats& rows, int columns) {
    Floats scales;
    for (size_t first = 0; first < rows.size(); first += columns) {
        float most = 0;
        for (int i = 0; i < columns; ++i) most = std::max(most, fabsf(rows[first + i]));
        scales.push_back(most / 448);
        for (int i = 0; i < columns; ++i) rows[first + i] = to_e4m3(rows[first + i] / scales.back());
    }
    return scales;
}

double relative(const float* y, const float* exact, size_t count) {
    double error = 0, norm = 0;
    for (size_t i = 0; i < count; ++i) error += pow(y[i] - exact[i], 2), norm += pow(exact[i], 2);
    return sqrt(error / norm);
}

int main(int count, char** words) {
    if (count != 7) return fprintf(stderr, "expects H F N ROWS LARGE SEED\n"), 2;
    const int hidden = atoi(words[1]), width = atoi(words[2]), columns = atoi(words[3]), rows = atoi(words[4]);
    std::mt19937 random(atoi(words[6]));
    const Floats up = mxfp4(2 * width, hidden, random), down = mxfp4(columns, width, random);
    std::normal_distribution<float> normal;
    Floats x(static_cast<size_t>(rows) * hidden);
    for (float& v : x) v = normal(random);
    for (int row = 0; atoi(words[5]) && row < rows; ++row) {
        for (int i = 0; i < 4; ++i) x[static_cast<size_t>(row) * hidden + i * 997 % hidden] *= 20;
    }
    const Floats x_scales = quantize(x, hidden);

    // h and y.
    auto run = [&](int interval) {
        Floats h(static_cast<size_t>(rows) * width), y(static_cast<size_t>(rows) * columns);
        for (int row = 0; row < rows; ++row) {
            const float *of = &x[static_cast<size_t>(row) * hidden], scale = x_scales[row] / sqrtf(hidden);
            for (int f = 0; f < width; ++f) {
                const float gate = dot(of, &up[static_cast<size_t>(f) * hidden], hidden, interval) * scale;
                const float other = dot(of, &up[static_cast<size_t>(width + f) * hidden], hidden, interval) * scale;
                h[static_cast<size_t>(row) * width + f] = gate / (1 + expf(-gate)) * other;
            }
        }
        Floats codes = h;
        const Floats scales = quantize(codes, width);
        for (int row = 0; row < rows; ++row) {
            for (int n = 0; n < columns; ++n) {
                const float v = dot(&codes[static_cast<size_t>(row) * width], &down[static_cast<size_t>(n) * width],
                                    width, interval) *
                                scales[row];
                y[static_cast<size_t>(row) * columns + n] = interval ? to_bf16(v) : v;
            }
        }
        return std::make_pair(h, y);
    };
    const auto [exact_h, exact] = run(0);
    for (int interval : {128, 256, 384, 512, 1024, 1 << 20}) {
        const auto [h, y] = run(interval);
        double most = 0, most_of_six = 0;
        int six_beyond = 0, calls_beyond = 0;
        for (int row = 0; row < rows; ++row) {
            const size_t first = static_cast<size_t>(row) * columns;
            most = std::max(most, relative(&y[first], &exact[first], columns));
        }
        const int tokens = 4000;
        Floats call, exact_call;
        std::uniform_real_distribution<float> weight(0.1f, 1.1f);
        for (int token = 0; token < tokens; ++token) {
            Floats sum(columns), exact_sum(columns);
            for (int i = 0; i < 6; ++i) {
                const size_t first = random() % rows * columns;
                const float w = weight(random);
                for (int n = 0; n < columns; ++n) sum[n] += w * y[first + n], exact_sum[n] += w * exact[first + n];
            }
            const double error = relative(sum.data(), exact_sum.data(), columns);
            most_of_six = std::max(most_of_six, error), six_beyond += error > 6e-3;
            call.insert(call.end(), sum.begin(), sum.end());
            exact_call.insert(exact_call.end(), exact_sum.begin(), exact_sum.end());
            if (token % 8 == 7) {
                calls_beyond += relative(call.data(), exact_call.data(), call.size()) > 6e-3;
                call.clear(), exact_call.clear();
            }
        }
        printf(
            "H %d F %d%s, %7d columns: h off %.1e, y error %.2e, largest of a row %.1e; six experts: largest %.1e, "
            "beyond 6e-3 %.4f; calls of 8 tokens beyond 6e-3 %.4f\n",
            hidden, width, atoi(words[5]) ? ", large columns" : "", interval,
            relative(h.data(), exact_h.data(), h.size()), relative(y.data(), exact.data(), y.size()), most, most_of_six,
            six_beyond / double(tokens), calls_beyond / (tokens / 8.0));
        fflush(stdout);
    }
}
