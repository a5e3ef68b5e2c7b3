import { mount } from 'svelte';
import App from './App.svelte';
import { session, takeLinkKey } from './api/session.svelte';
import { router } from './shell/router.svelte';
import './styles/colours.css';
import './styles/base.css';

const linkKey = takeLinkKey();
router.start();
void session.start(linkKey);

const target = document.getElementById('app');
if (target === null) throw new Error('the page has no #app element');
mount(App, { target });
