"""The raw kernels of the CuPy row: 256 threads for a block of at most 4096 elements, see `cpu.blocks`."""

SOURCE = r"""
typedef long long ll;

struct Block { ll row, first, length, segment, real; };

__device__ Block block_of(const ll* table, const ll* valid, ll blocks, ll segments) {
    ll r = blockIdx.x / blocks;
    const ll* entry = table + 4 * (blockIdx.x % blocks);
    return {r, entry[0], entry[1], entry[2], valid[r * segments + entry[2]] - entry[3]};
}

// b - scale * sgn(b), and b itself where it is not real
__device__ float left_over(float b, float scale, bool real) {
    return real ? b - (b >= 0.0f ? scale : -scale) : b;
}

extern "C" __global__ void encode(const ll* table, const ll* valid, ll n, ll blocks, ll segments, const float* x,
                                  const float* buffer, const float* sent, float* out, unsigned char* bits,
                                  double* squares) {
    Block at = block_of(table, valid, blocks, segments);
    float scale = sent[at.row * segments + at.segment];
    float sum = 0.0f;
    for (ll base = 0; base < at.length; base += blockDim.x) {
        ll i = base + threadIdx.x, k = at.row * n + at.first + i;
        bool inside = i < at.length, real = i < at.real && inside;
        float b = 0.0f;
        if (inside) {
            b = x[k] + left_over(buffer[k], scale, real);
            out[k] = b;
        }
        unsigned ones = __ballot_sync(0xffffffffu, real && b >= 0.0f);
        if (inside && i % 8 == 0)
            bits[at.row * ((n + 7) / 8) + (at.first + i) / 8] = (unsigned char)(ones >> (threadIdx.x % 32));
        if (real) sum += b * b;
    }
    __shared__ double parts[256];
    parts[threadIdx.x] = sum;
    __syncthreads();
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) parts[threadIdx.x] += parts[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0) squares[blockIdx.x] = parts[0];
}

extern "C" __global__ void residual(const ll* table, const ll* valid, ll n, ll blocks, ll segments, const float* b,
                                    const float* scales, float* out) {
    Block at = block_of(table, valid, blocks, segments);
    float scale = scales[at.row * segments + at.segment];
    for (ll i = threadIdx.x; i < at.length; i += blockDim.x) {
        ll k = at.row * n + at.first + i;
        out[k] = left_over(b[k], scale, i < at.real);
    }
}

extern "C" __global__ void decode(const ll* table, const ll* valid, ll n, ll blocks, ll segments,
                                  const unsigned char* bits, const float* scales, ll ranks, ll bytes, float* out) {
    Block at = block_of(table, valid, blocks, segments);
    for (ll i = threadIdx.x; i < at.length; i += blockDim.x) {
        ll k = at.first + i;
        float total = 0.0f;
        for (ll w = 0; w < ranks; ++w) {
            ll message = at.row * ranks + w;
            float scale = scales[message * segments + at.segment];
            float value = (bits[message * bytes + k / 8] >> (k % 8)) & 1 ? scale : -scale;
            total = w == 0 ? value : total + value;
        }
        out[at.row * n + k] = i < at.real ? total : 0.0f;
    }
}
"""
