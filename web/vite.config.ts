import { svelte } from '@sveltejs/vite-plugin-svelte';
import { defineConfig } from 'vitest/config';

// `npm run dev` serves the page from sources and passes everything else on to a running tracker.
const tracker = process.env.MESHNET_TRACKER ?? 'http://127.0.0.1:8080';

export default defineConfig({
  base: '/dashboard/',
  plugins: [svelte()],
  build: {
    outDir: '../src/meshnet/web/dist',
    emptyOutDir: true,
    target: ['chrome123', 'firefox121', 'safari17.5'],
    // Strict CSP: nothing inline, so no asset becomes a data: address and no polyfill is injected.
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
    reportCompressedSize: true,
    chunkSizeWarningLimit: 300,
  },
  server: { proxy: { '/api': tracker, '/v1': tracker } },
  test: { include: ['test/**/*.test.ts'], environment: 'node' },
  resolve: process.env.VITEST ? { conditions: ['browser'] } : undefined,
});
