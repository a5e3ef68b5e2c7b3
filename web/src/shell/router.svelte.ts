// Addresses: /dashboard/<tab>[/<id>]. The history API moves between them; the server answers all with one page.

export const TABS = ['mesh', 'chat', 'calls', 'console', 'routing', 'accounts'] as const;
export type Tab = (typeof TABS)[number];

export interface Place {
  tab: Tab | null;
  id: string | null;
}

export function parsePlace(path: string): Place {
  const [tab, id] = path.replace(/^\/dashboard\/?/, '').split('/');
  const known = TABS.find((name) => name === tab) ?? null;
  return { tab: known, id: known !== null && id ? decodeURIComponent(id) : null };
}

export function addressOf(tab: Tab, id: string | null = null): string {
  return `/dashboard/${tab}${id === null ? '' : `/${encodeURIComponent(id)}`}`;
}

class Router {
  place = $state<Place>(parsePlace(location.pathname));

  start(): void {
    window.addEventListener('popstate', () => {
      this.place = parsePlace(location.pathname);
    });
    // Links stay links (open in a new window, copy the address); plain clicks move without a load.
    document.addEventListener('click', (event) => {
      if (event.defaultPrevented || event.button !== 0) return;
      if (event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
      const link = event.target instanceof Element ? event.target.closest('a') : null;
      if (link === null || link.target !== '' || link.hash !== '' || link.hasAttribute('download')) return;
      if (link.origin !== location.origin || !link.pathname.startsWith('/dashboard')) return;
      event.preventDefault();
      this.go(link.pathname);
    });
  }

  go(path: string, options: { replace?: boolean } = {}): void {
    if (path !== location.pathname) {
      if (options.replace) history.replaceState(null, '', path);
      else history.pushState(null, '', path);
    }
    this.place = parsePlace(path);
  }
}

export const router = new Router();
