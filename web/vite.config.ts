import { svelte } from '@sveltejs/vite-plugin-svelte';
import { readdirSync, readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { gzipSync } from 'node:zlib';
import { defineConfig } from 'vitest/config';

// `npm run dev` serves the page from sources and passes everything else on to a running tracker.
const tracker = process.env.MESHNET_TRACKER ?? 'http://127.0.0.1:8080';

/** Packs what the build wrote, once, so that the tracker sends it compressed at no cost. */
function packed(dir: string) {
  return {
    name: 'meshnet-packed',
    apply: 'build' as const,
    closeBundle() {
      for (const entry of readdirSync(dir, { recursive: true, withFileTypes: true })) {
        if (!entry.isFile() || !/\.(?:js|css|html|svg)$/.test(entry.name)) continue;
        const path = join(entry.parentPath, entry.name);
        writeFileSync(`${path}.gz`, gzipSync(readFileSync(path), { level: 9 }));
      }
    },
  };
}

const outDir = '../src/meshnet/web/dist';

export default defineConfig({
  base: '/dashboard/',
  plugins: [svelte(), packed(outDir)],
  build: {
    outDir,
    emptyOutDir: true,
    target: ['chrome123', 'firefox121', 'safari17.5'],
    // Strict CSP: nothing inline, so no asset becomes a data: address and no polyfill is injected.
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
    reportCompressedSize: true,
    chunkSizeWarningLimit: 300,
  },
  worker: { format: 'es' },
  server: { proxy: { '/api': tracker, '/v1': tracker } },
  test: { include: ['test/**/*.test.ts'], environment: 'node' },
  resolve: process.env.VITEST ? { conditions: ['browser'] } : undefined,
});
